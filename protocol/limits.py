"""Every number that bounds what crosses the wire. README.md lists them; a test holds the two together.

Bytes that exceed a limit are refused before they are decoded as far as the library below allows. Left out on purpose:
configuration. Two peers of one protocol version have the same limits.
"""

NUM_FRAMES = 3
"""Frames of a message: header, body, buffers."""
MAX_HEADER_BYTES = 256
"""Size of the header frame."""
MAX_BODY_BYTES = 8 * 2**20
"""Size of the body frame; parsed msgpack takes up to 65 times its bytes, so this bounds memory too."""
MAX_BUFFER_BYTES = 2**30
"""Size of the buffer frame; an adapter is the largest thing in it."""
BUFFER_ALIGNMENT = 16
"""Every array starts at a multiple of this in the buffer frame."""

MAX_ITEMS = 4096
"""Elements of any list: groups of an order, samples of a group."""
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
"""Orders an actor may offer to hold at once."""

HIGH_WATER_MARK = 2 * MAX_CREDITS
"""Messages a socket queues for one peer before sending blocks: all credits, and as many heartbeats."""
SEND_TIMEOUT_S = 10.0
"""How long sending may block before the peer counts as stuck."""
LINGER_MS = 1000
"""How long a closing socket still tries to hand over what it holds."""
MAX_INBOUND_BYTES = 64 * 2**20
"""Largest frame that a learner takes; only a Policy is larger, and that goes the other way."""
MAX_MESSAGES_A_PUMP = 512
"""Messages a learner takes in before it goes on with its work."""
MAX_BACKLOG_BYTES = 512 * 2**20
"""Bytes that all TCP connections of a learner may have sent that it has not taken in as messages."""
BACKLOG_SHARE_BYTES = 2**20
"""A connection with less of them is never the one that is cut for it."""
HANDSHAKE_COST = 256
"""What a connection costs the actor that makes it, out of its allowance."""
MAX_CONNECTIONS = 256
"""Connections a learner holds."""
MAX_UNAUTHENTICATED = 128
"""Of these, TCP connections that have not proved a key; the one that came first makes room for the next."""
MAX_HANDSHAKE_BYTES = 65_536
"""What a TCP connection may send before it has proved a key; a handshake of an actor has less than 1000."""
LISTEN_BACKLOG = 64
"""TCP connections that the kernel holds for a learner that has not accepted them yet."""
HANDSHAKE_MS = 5000
"""A connection whose handshake takes longer is closed."""
ALLOWANCE_BURST = 4096.0
"""What an actor may spend at once; a message costs 1 and what its size costs."""
ALLOWANCE_PER_S = 500.0
"""What an actor may spend for ever."""
COST_BYTES = 65_536
"""Bytes that cost as much as a message."""
MAX_REFUSALS = 8
"""Times an actor is told Refused before it is shut out."""
BAN_S = 60.0
"""How long an actor stays outside that flooded, or was refused too often."""
KEEPALIVE_MS = 2000
"""Interval of ZeroMQ's own pings, which find a dead machine or a stopped process."""
KEEPALIVE_TIMEOUT_MS = 10_000
"""A connection that answers no ping for this long is closed."""
MAX_HANDSHAKE_FAILURES = 3
"""CURVE handshakes that may end in a row without a reason, and for `silence_s` besides, before the key is blamed."""

MAX_PARSE_RATIO = 80
"""Bytes that reading an input holds for each of its bytes, beside the input; one byte of msgpack can be a list."""
PARSE_BYTES = 1_048_576
"""Bytes that reading an input holds whatever its size."""

MAX_LOGPROB = 1e-3
"""Largest log-prob of a token; above 0 only by rounding."""
MIN_LOGPROB = -1000.0
"""Smallest log-prob of a token that was drawn; one in e^1000 never is."""
MAX_ENTROPY = 22.0
"""Largest entropy of a token in nats; a vocabulary of MAX_COUNT has 21.5."""

MAX_SHOWN_CHARS = 200
"""Characters of a peer's text that a log shows."""
