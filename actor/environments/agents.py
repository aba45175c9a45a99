"""Plays the completions of an order with the user's agents, which call the model over an endpoint (endpoint.py).

    all begin -> [ each asks or ends -> those that asked take a turn together -> each gets its own ] until none asks

As in episodes.py turns are synchronous: a turn is decoded when every agent has asked or ended. So a batch follows from
what the agents say, and the same order gives the same tokens, as long as they say the same.

    tokens of an episode   the first token | the rest of the first messages | turn 1 | what was added | turn 2 | ...
    trained                     prompt                    0                     1            0             1

An episode is one conversation that only grows. A request must begin with all that was said before, the model's own
replies as they were sent. What comes after them is put behind the tokens of the last turn, as the chat template shows
it (shared/model/conversation.py), and the ids of earlier turns are never tokenised again. A request that rewrites
history is refused with the message that differs: the wire has one sequence a completion, and the same tokens in another
context would have other log-probs. The agent may go on from where it was. One that is refused MAX_REFUSALS times has an
error.

One that reaches a limit, of turns or of tokens, is told so as well. If the agent then raises, as most would, its
episode has been cut short: truncated, with a score of 0.

An episode without any turn is an error, or abstains if its first request does not fit into the cap: its task is too
long, as a prompt can be. So that its group has all its completions, the model then says one turn to nobody, which the
rule for the outcome (verifier.on_error, on_abstain) keeps from being trained on.
"""

from collections.abc import Sequence
from dataclasses import replace

from actor.engines.engine import Engine
from actor.environments.chat_api import Asked, ChatMessage, Refused, Said
from actor.environments.contract import ToolCall
from actor.environments.episodes import Beat, Episode, all_episodes, ask, take_turns
from actor.environments.pool import EnvironmentPool, Lost
from actor.environments.worker import Act, Acted, Call, Rewarded, Say
from protocol.messages import Finish, Order, Outcome
from shared.config.environment import EnvironmentConfig
from shared.errors import ModelError
from shared.model.conversation import QUESTION, CallForm, added_ids, call_form
from shared.model.prompt import Message, Prompter

MAX_REFUSALS = 8
LIMITS = ("cap", "max_turns", "context_length_exceeded")
"""Codes of refusals that are no fault of the agent."""
SHOWN_CHARS = 60


class AgentEpisode:
    """One episode of an agent: what was said, as messages and as tokens."""

    def __init__(self, episode: Episode, prompter: Prompter, cap: int, max_turns: int) -> None:
        self.episode, self.prompter, self.cap, self.max_turns = episode, prompter, cap, max_turns
        self.said: list[ChatMessage] = []
        """All messages up to the model's last turn."""
        self.asked = Asked(messages=[], tools="", may_call=False)
        """The last request that was answered."""
        self.form: CallForm | None = None
        self.refusals = 0

    def take(self, asked: Asked) -> Refused | None:
        """Why a request was refused, None if it was not."""
        refused = self.append(asked)
        if refused:
            self.refusals += 1
        return refused

    def append(self, asked: Asked) -> Refused | None:
        """Append what the agent adds to the tokens so far. Returns why it was refused, None if it was not."""
        episode = self.episode
        if episode.fault:
            return Refused(reason=episode.fault.note, code="lost")
        if episode.finish is Finish.LENGTH:
            return Refused(reason=f"The episode has reached its cap of {self.cap} tokens.", code="cap")
        if episode.turns == self.max_turns:
            reason = f"The model has had its {self.max_turns} turns; environment.max_turns sets how many."
            return Refused(reason=reason, code="max_turns")
        if reason := self.rewriting(asked):
            return Refused(reason=reason, code="history_rewritten")
        try:
            ids = self.added(asked)
        except (ModelError, RecursionError) as error:  # the latter for tools nested without end
            return Refused(reason=str(error), code="template")
        if episode.length + len(ids) >= self.cap:
            return self.without_room(len(ids))
        episode.put(ids)
        self.asked = asked
        return None

    def without_room(self, tokens: int) -> Refused:
        reason = (
            f"{tokens} tokens more do not fit: the episode has {self.episode.length}, and rollout.max_new_tokens ="
            f" {self.cap} counts all that the model reads and writes."
        )
        if self.episode.turns:
            self.episode.finish = Finish.LENGTH
        else:
            # As a prompt that is too long leaves out its task.
            self.episode.fault = Lost(outcome=Outcome.ABSTAIN, note=f"The agent's first request is too long: {reason}")
        return Refused(reason=reason, code="context_length_exceeded")

    def rewriting(self, asked: Asked) -> str:
        """How a request differs from what was said; empty if it only goes on."""
        if not self.said:
            return ""
        must = (
            "an episode is one conversation, to which a request may only add; keep all messages and tools as they were"
        )
        if asked.tools != self.asked.tools:
            return f"The tools are not those of the requests before: {must}."
        for number, (now, then) in enumerate(zip(asked.messages, self.said, strict=False)):
            if content(now) != content(then):
                return f"Message {number} is {in_short(now)} and was {in_short(then)} in the turn before: {must}."
        if len(asked.messages) <= len(self.said):
            return f"The request has {len(asked.messages)} messages, and {len(self.said)} were said already: {must}."
        return ""

    def added(self, asked: Asked) -> list[int]:
        """The ids of what is new. ModelError if the template cannot show it."""
        shown = replace(self.prompter, tools=asked.tools)
        self.form = call_form(shown) if asked.tools and asked.may_call else None
        if self.said:
            new, calls = asked.messages[len(self.said) :], self.said[-1].calls
            names = [call.name for call in calls]
            return added_ids(shown, for_template(new), calls=names, turn=self.episode.turns)
        begins = list(self.prompter.begins)
        ids = shown.chat_ids(for_template(asked.messages))
        if ids[: len(begins)] != begins:
            raise ModelError(f"The chat template of {shown.name} begins this conversation in another way than others.")
        return ids[len(begins) :]

    def nobody(self) -> None:
        """A place for a turn of an episode that is lost."""
        ids = self.prompter.chat_ids([QUESTION])[len(self.prompter.begins) :]
        self.episode.put(ids[: self.cap - 1])

    def reply(self) -> Said:
        """The turn that was just sampled."""
        episode, turn = self.episode, self.episode.last_turn
        ids = turn.ids.tolist()
        whole = self.prompter.as_the_model_sees([token for token in ids if token not in self.prompter.end_ids])
        found = list(self.form.calls(whole)) if self.form else []
        text = self.form.before(whole) if self.form and found else self.prompter.text(ids)
        calls = [ToolCall(name=name, arguments=arguments) for name, arguments in found]
        self.said = [*self.asked.messages, ChatMessage(role="assistant", text=text, calls=calls)]
        return Said(
            number=episode.turns,
            text=text,
            calls=calls,
            is_cut=episode.finish is Finish.LENGTH,
            read=len(self.prompter.begins) + episode.length - len(ids),
            written=len(ids),
        )


class Agents:
    """Plays orders with one pool of agents."""

    def __init__(self, pool: EnvironmentPool, prompter: Prompter, config: EnvironmentConfig, *, scores: bool) -> None:
        """scores: whether the agent's reward counts."""
        self.pool, self.prompter, self.config, self.scores = pool, prompter, config, scores

    def play(self, order: Order, engine: Engine, beat: Beat) -> list[Episode]:
        """All completions of an order, in their order."""
        cap, episodes = order.sampling.max_new_tokens, all_episodes(order)
        turns = self.config.max_turns
        played = {seat: AgentEpisode(one, self.prompter, cap, turns) for seat, one in enumerate(episodes)}
        begin: dict[int, Call] = {
            seat: Act(columns=episode.order.columns, scores=self.scores) for seat, episode in enumerate(episodes)
        }
        live = self.play_until_turn(begin, played, beat)
        silent = {seat: one for seat, one in played.items() if seat not in live}
        for one in silent.values():
            note = "The agent ended without a request to the model."
            one.episode.fault = one.episode.fault or Lost(outcome=Outcome.ERROR, note=note)
            one.nobody()
        turning = sorted([*live, *silent])
        while turning:
            take_turns({seat: played[seat].episode for seat in turning}, order.sampling, engine, beat)
            live = self.play_until_turn({seat: Say(reply=played[seat].reply()) for seat in live}, played, beat)
            turning = live
        return episodes

    def play_until_turn(self, calls: dict[int, Call], played: dict[int, AgentEpisode], beat: Beat) -> list[int]:
        """These calls, and what follows from them. Returns the seats whose agents wait for a turn then."""
        episodes = {seat: one.episode for seat, one in played.items()}
        found: list[int] = []
        while calls:
            answers = ask(self.pool, calls, episodes, beat)
            self.cut_short(calls, episodes)
            calls = {}
            for seat, answer in answers.items():
                match answer:
                    case Asked():
                        refused = played[seat].take(answer)
                        if refused is None:
                            found.append(seat)
                        elif played[seat].refusals < MAX_REFUSALS:
                            calls[seat] = Say(reply=refused)
                        else:
                            self.give_up(seat, played[seat].episode, refused)
                    case Acted(value=value) if self.scores:
                        episodes[seat].reward = Rewarded(value=value)
                    case _:
                        pass
        return sorted(found)

    def cut_short(self, calls: dict[int, Call], episodes: dict[int, Episode]) -> None:
        """An agent that raises after it was told of a limit has been cut short, and is no error."""
        for seat, call in calls.items():
            episode = episodes[seat]
            match call:
                case Say(reply=Refused(code=code)) if code in LIMITS and episode.turns:
                    if episode.fault and episode.fault.outcome is Outcome.ERROR:
                        episode.fault, episode.finish = None, Finish.LENGTH
                        episode.reward = Rewarded(value=0.0) if self.scores else None
                case _:
                    pass

    def give_up(self, seat: int, episode: Episode, refused: Refused) -> None:
        note = f"The agent was refused {MAX_REFUSALS} times, last: {refused.reason}"
        episode.fault = episode.fault or Lost(outcome=Outcome.ERROR, note=note)
        self.pool.end(seat)

    def close(self) -> None:
        self.pool.close()


def content(message: ChatMessage) -> object:
    """What must stay as it was. Frameworks drop white space at the ends, and write arguments in their own way."""
    return message.role, message.text.strip(), [(call.name, call.arguments) for call in message.calls]


def in_short(message: ChatMessage) -> str:
    calls = "".join(f" with a call of {call.name}" for call in message.calls)
    return f"of {message.role} {message.text[:SHOWN_CHARS]!r}{calls}"


def for_template(messages: Sequence[ChatMessage]) -> list[Message]:
    """As chat templates read them."""
    return [
        {"role": message.role, "content": message.text}
        | ({"name": message.name} if message.name else {})
        | ({"tool_calls": [for_template_call(call) for call in message.calls]} if message.calls else {})
        for message in messages
    ]


def for_template_call(call: ToolCall) -> Message:
    return {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
