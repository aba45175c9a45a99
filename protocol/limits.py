"""Every limit of the wire protocol. README.md lists them, and a test compares the two.

Bytes that exceed a limit are refused before they are decoded, as far as msgpack and libzmq allow. Left out on purpose:
configuration. Two peers with the same protocol version have the same limits.
"""

NUM_FRAMES = 3
"""Frames of a message: header, body, buffers."""
MAX_HEADER_BYTES = 256
"""Size of the header frame."""
MAX_BODY_BYTES = 8 * 2**20
"""Size of the body frame; parsed msgpack takes up to 65 times its bytes, so this limits memory too."""
GROUPS_BYTES = MAX_BODY_BYTES - 2**17
"""What the groups of an order may take of it, so that ids, times and a teacher's part find room beside them."""
MAX_BUFFER_BYTES = 2**30
"""Size of the buffer frame; an adapter is its largest content."""
BUFFER_ALIGNMENT = 16
"""Every array starts at a multiple of this in the buffer frame."""
PART_BYTES = 2**20
"""A longer buffer comes from the learner in several frames of this size; only the last one may be smaller."""

MAX_ITEMS = 4096
"""Elements of any list: groups of an order, completions of a group."""
MAX_KEYS = 64
"""Entries of any map: fields of a message, columns of a task."""
MAX_NAME_CHARS = 128
"""Length of an id or a name, in Unicode characters."""
MAX_TEXT_CHARS = 65_536
"""Length of any other text, in Unicode characters."""
MAX_STRING_BYTES = 4 * MAX_TEXT_CHARS
"""Size of any string in UTF-8, where a character takes four bytes at most."""
MAX_COUNT = 2**31 - 1
"""Largest version or number of tokens."""
MAX_SEED = 2**63 - 1
"""Largest sampling seed."""
MAX_SCORE = 1e9
"""Largest absolute score, so that a score is never NaN or infinite."""
MAX_CREDITS = 1024
"""Orders an actor may accept at once."""

HIGH_WATER_MARK = 2 * MAX_CREDITS
"""Messages a socket queues for one peer before sending blocks: all credits, and as many heartbeats."""
SEND_TIMEOUT_S = 10.0
"""How long sending may block before the peer counts as stuck."""
LINGER_MS = 1000
"""How long a closing socket still tries to send its queue."""
MAX_INBOUND_BYTES = 64 * 2**20
"""Largest frame that a learner accepts; only a Policy is larger, and the learner sends it."""
MAX_MESSAGES_A_PUMP = 512
"""Messages a learner handles before it continues its own work."""
MAX_BACKLOG_BYTES = 512 * 2**20
"""Bytes that all TCP connections together may have sent and the learner has not taken as messages."""
BACKLOG_SHARE_BYTES = 2**20
"""A connection with a smaller backlog is never cut for MAX_BACKLOG_BYTES."""
HANDSHAKE_COST = 256
"""What a new connection costs its actor, out of the allowance."""
MAX_CONNECTIONS = 2048
"""Open connections of a learner."""
MAX_UNAUTHENTICATED = 128
"""Unauthenticated TCP connections among them; a new one replaces the oldest."""
MAX_HANDSHAKE_BYTES = 65_536
"""What an unauthenticated TCP connection may send; the handshake of an actor has less than 1000 bytes."""
LISTEN_BACKLOG = 64
"""TCP connections that wait in the kernel until the learner accepts them."""
HANDSHAKE_MS = 5000
"""A connection whose handshake takes longer is closed."""
ALLOWANCE_BURST = 4096.0
"""What an actor may spend at once; a message costs 1 and its bytes divided by COST_BYTES."""
ALLOWANCE_PER_S = 500.0
"""What an actor may spend in the long run."""
COST_BYTES = 65_536
"""Bytes that cost as much as a message."""
MAX_REFUSALS = 8
"""Refused messages sent to an actor before it is banned."""
BAN_S = 60.0
"""Length of the ban for an actor that flooded or was refused too often."""
KEEPALIVE_MS = 2000
"""Interval of the pings of an actor's ZeroMQ, which detect a dead machine or a stopped process."""
KEEPALIVE_TIMEOUT_MS = 10_000
"""A connection without a reply to a ping, or without a ping, for this long is closed."""
MAX_HANDSHAKE_FAILURES = 3
"""Handshakes in a row that must fail without a reason, for at least `silence_s`, before a wrong key is reported."""

MAX_PARSE_RATIO = 80
"""Bytes of memory that decoding takes for each byte of input, besides the input; one byte of msgpack can be a list."""
PARSE_BYTES = 1_048_576
"""Bytes of memory that decoding takes for an input of any size."""

MAX_LOGPROB = 1e-3
"""Largest log-prob of a token; above 0 only by rounding."""
MIN_LOGPROB = -1000.0
"""Smallest log-prob of a sampled token; a probability of e^-1000 is never sampled."""
MAX_ENTROPY = 22.0
"""Largest entropy of a token in nats; a vocabulary of MAX_COUNT has 21.5."""

MAX_SHOWN_CHARS = 200
"""Characters of a peer's text that are logged."""
