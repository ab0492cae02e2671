"""What the clients of a server ask over time: a function of a seed, and of the answers to what they have asked before.

Several chats go on at once. A prompt is a new text, a chat's history with more text, the beginning of another chat, or a
history that was edited or cut: prefixes that servers have in their caches, and prefixes that differ from those by a token.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


class Way(enum.Enum):
    """How a prompt gets its answer, or does not get one."""

    HANDED_OVER = "handed over"
    BOTH_AT_ONCE = "both servers at once"
    PLAIN = "decode alone"
    DEAD_ADDRESS = "dead address"
    ABORTED_ON_PREFILL = "aborted on prefill"
    NEVER_DECODED = "never asked for at decode"
    ABORTED_WHILE_LOADING = "aborted while loading"
    ABORTED_WHILE_ANSWERING = "aborted while answering"

    @property
    def is_aborted(self) -> bool:
        """Whether nobody gets the answer."""
        return self.name.startswith(("ABORTED", "NEVER"))


@dataclass(frozen=True)
class Prompt:
    """Tokens, and the adapter that they are for. `is_embedded`: the server gets the embeddings of the tokens."""

    tokens: tuple[int, ...]
    adapter: str | None = None
    is_embedded: bool = False


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One prompt. `prefilled` is what prefill is asked: mostly the same. `made` says how the prompt came to be."""

    number: int
    way: Way
    prompt: Prompt
    prefilled: Prompt
    max_tokens: int
    made: str

    @property
    def is_mistaken(self) -> bool:
        """Whether prefill is asked another prompt, so that its state must not be used."""
        return self.prefilled != self.prompt

    def __str__(self) -> str:
        adapter = f", adapter {self.prompt.adapter}" if self.prompt.adapter else ""
        embedded = ", as embeddings" if self.prompt.is_embedded else ""
        other = ""
        if self.is_mistaken:
            pairs = zip(self.prompt.tokens, self.prefilled.tokens, strict=False)
            shared = next((at for at, (one, two) in enumerate(pairs) if one != two), len(self.prompt.tokens))
            other = f", of another prompt: {len(self.prefilled.tokens)} tokens, the first {shared} the same"
            other += f", adapter {self.prefilled.adapter or 'none'}{', embeddings' * self.prefilled.is_embedded}"
        return (
            f"turn {self.number}: {self.made}, {len(self.prompt.tokens)} tokens{adapter}{embedded}, "
            f"{self.way.value}{other}, {self.max_tokens} tokens wanted"
        )


@dataclass(frozen=True, kw_only=True)
class Habits:
    """What the clients do, as weights of each way, and what a server can take.

    `mistakes` is the probability that a hand-over is of another prompt, `adapters` the choice of adapters, `unit` a number of
    tokens near whose multiples lengths are more frequent than elsewhere, `longest` the most tokens of a prompt, and
    `long_answers` the probability that an answer is long.
    """

    ways: Mapping[Way, int]
    mistakes: float = 0.12
    adapters: Sequence[str | None] = (None,)
    embedded: float = 0.0
    unit: int = 32
    longest: int = 600
    long_answers: float = 0.1
    most_at_once: int = 4
    num_rounds: int = 16


@dataclass
class _Chat:
    prompt: Prompt
    history: tuple[int, ...]


@dataclass
class Conversation:
    """Rounds of turns that are asked at once. After each round, `answered` gets the answers."""

    seed: int
    habits: Habits
    _chats: list[_Chat] = field(default_factory=list)
    _num_turns: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._openings = [(), self._text(), self._text()]

    def rounds(self) -> range:
        return range(self.habits.num_rounds)

    def next_round(self) -> list[Turn]:
        """What is asked next."""
        return [self._turn() for _ in range(self._random.randint(1, self.habits.most_at_once))]

    def answered(self, turns: Sequence[Turn], answers: Sequence[Sequence[int]]) -> None:
        """The answers to the turns of a round, empty for those that were aborted."""
        for turn, answer in zip(turns, answers, strict=True):
            if not turn.way.is_aborted:
                self._chats.append(_Chat(turn.prompt, (*turn.prompt.tokens, *answer)))
        del self._chats[: -2 * self.habits.most_at_once]

    def _turn(self) -> Turn:
        choose, habits = self._random, self.habits
        made, tokens, adapter = self._prompt()
        most = choose.randint(habits.longest // 2, habits.longest)
        prompt = Prompt(tokens[:most], adapter, choose.random() < habits.embedded)
        way = choose.choices(list(habits.ways), list(habits.ways.values()))[0]
        prefilled = prompt
        if way in (Way.HANDED_OVER, Way.BOTH_AT_ONCE) and choose.random() < habits.mistakes and len(prompt.tokens) > 2:
            prefilled = self._mistaken(prompt)
        self._num_turns += 1
        wanted = choose.randint(2, 12) if choose.random() < 1 - habits.long_answers else choose.randint(40, 80)
        return Turn(number=self._num_turns, way=way, prompt=prompt, prefilled=prefilled, max_tokens=wanted, made=made)

    def _prompt(self) -> tuple[str, tuple[int, ...], str | None]:
        """How a prompt is made, its tokens and its adapter."""
        choose = self._random
        adapter = choose.choice(self.habits.adapters)
        if not self._chats or choose.random() < 0.15:
            return "a new chat", choose.choice(self._openings) + self._text(), adapter
        chat = choose.choice(self._chats)
        history, adapter = chat.history, chat.prompt.adapter if choose.random() < 0.5 else adapter
        cut = choose.randint(1, len(history))
        match choose.choices(range(6), (40, 10, 15, 10, 10, 15))[0]:
            case 0:
                return "a chat goes on", history + self._text(), adapter
            case 1:
                return "asked again", chat.prompt.tokens, adapter
            case 2:
                return "a chat's beginning", history[:cut] + self._text(), adapter
            case 3:
                return "a history that was cut", history[:cut], adapter
            case 4:
                return "a history", history, adapter
            case _:
                return "a history that was edited", self._edited(history, cut - 1) + self._text(), adapter

    def _mistaken(self, prompt: Prompt) -> Prompt:
        """Another prompt than this one: another adapter, an edited token, or other tokens altogether."""
        choose, tokens = self._random, prompt.tokens
        others = [adapter for adapter in self.habits.adapters if adapter != prompt.adapter]
        if others and choose.random() < 0.5:
            return Prompt(tokens, choose.choice(others), prompt.is_embedded)
        edited = self._edited(tokens, choose.randrange(len(tokens) - 1))
        cut = choose.choice((len(tokens), len(tokens), choose.randint(2, len(tokens))))
        more = choose.choice(((), self._text()))
        at = next(at for at, (one, two) in enumerate(zip(tokens, edited, strict=True)) if one != two)
        return Prompt((edited[: max(cut, at + 2)] + more)[: self.habits.longest], prompt.adapter, prompt.is_embedded)

    def _edited(self, tokens: tuple[int, ...], at: int) -> tuple[int, ...]:
        return (*tokens[:at], (tokens[at] + self._random.randint(1, 200)) % 250, *tokens[at + 1 :])

    def _text(self) -> tuple[int, ...]:
        """Random tokens: a few, about as many as fill pages, or any number."""
        choose, unit = self._random, self.habits.unit
        length = choose.choice((
            choose.randint(1, 8),
            max(1, unit * choose.randint(1, 6) + choose.randint(-2, 2)),
            choose.randint(1, self.habits.longest // 3),
        ))  # fmt: skip
        return tuple(choose.randrange(250) for _ in range(length))
