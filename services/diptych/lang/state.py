"""A program's state: what it appends is done in order by a thread of its own, so branches run beside each other.

Reading a variable waits for it. What fails ends the state: all that was to follow has the same error.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any, Final, Self

from diptych.common.errors import DiptychError, InvalidRequest
from diptych.lang.backend import Backend, BackendError, Made, Message
from diptych.lang.choices import ScoredChoice
from diptych.lang.expressions import (
    Expression,
    Gen,
    Image,
    RoleBegin,
    RoleEnd,
    Select,
    Text,
    message_of,
    named,
    parts_of,
    with_defaults,
)
from diptych.lang.transcript import Transcript

SEED_BITS: Final = 31
JOINS: Final = ("gather_variable", "concate_and_append")  # in SGLang's words


class ProgramError(DiptychError):
    """Part of a program failed. The cause says why."""


class _Pieces:
    """Text as it comes, for those who follow it from another thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._pieces: list[tuple[str, str]] = []  # of which variable, or of none; and the text
        self._has_ended = False

    def add(self, name: str, text: str) -> None:
        with self._changed:
            self._pieces.append((name, text))
            self._changed.notify_all()

    def end(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def __iter__(self) -> Iterator[tuple[str, str]]:
        place = 0
        while new := self._behind(place):
            yield from new
            place += len(new)

    def _behind(self, place: int) -> list[tuple[str, str]]:
        """Return what follows, once it is there; nothing at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or len(self._pieces) > place)
            return self._pieces[place:]


class State:
    """What a program has said so far, and its variables. A program's function gets one; `run` returns it."""

    def __init__(
        self,
        backend: Backend,
        defaults: Mapping[str, Any],
        *,
        transcript: Transcript | None = None,
        variables: Mapping[str, Any] | None = None,
        streams: bool = False,
    ) -> None:
        self.ret_value: Any = None  # what the program's function returned
        self._backend, self._defaults, self._streams = backend, defaults, streams
        self._transcript = transcript or Transcript()  # its thread's
        self._known: dict[str, Any] = dict(variables or {})
        self._futures: dict[str, Future[str]] = {}  # of variables that this state sets: the newest of each name
        self._metas: dict[str, Mapping[str, Any]] = {}
        self._error: ProgramError | None = None
        self._pieces = _Pieces()
        self._is_over = False
        self._writer: int | None = None  # the thread of the program's function
        self._news = threading.Condition()  # a variable is known, or nothing more comes
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="lang")

    def __iadd__(self, what: Expression | str) -> Self:
        """Append to it. Returns at once. Raises `ProgramError` behind its end."""
        if self._is_over:
            raise ProgramError("the program has ended: nothing can be appended any more")
        for part in parts_of(what):
            future: Future[str] = Future()
            self._know(dict.fromkeys(named([part]), future))
            self._thread.submit(self._perform, with_defaults(part, self._defaults), future)
        return self

    def __getitem__(self, name: str) -> Any:
        """Return a variable, once it is there. Raises `ProgramError`, and `KeyError` if nothing sets it.

        Who follows a streamed run from outside waits until the program has come so far.
        """
        if self._is_followed:
            with self._news:
                self._news.wait_for(lambda: self._is_over or name in self)
        if name in self._futures:
            return self._futures[name].result()
        if name in self._known:
            return self._known[name]
        raise KeyError(f"no part of the program sets {name!r}")

    def get(self, name: str, default: Any = None) -> Any:
        """Return a variable, or `default` if nothing sets it."""
        return self[name] if name in self else default  # noqa: SIM401 -- this is what does it

    def __contains__(self, name: str) -> bool:
        return name in self._futures or name in self._known

    @property
    def set_names(self) -> Sequence[str]:
        """The variables that this state has set itself."""
        return list(self._futures)

    @property
    def error(self) -> ProgramError | None:
        """Why it ended early, if it did."""
        return self._error

    def written_here(self) -> None:
        """The program's function runs in this thread."""
        self._writer = threading.get_ident()

    @property
    def _is_followed(self) -> bool:
        """Whether this thread only looks on while the program's function runs in another one."""
        return self._streams and not self._is_over and self._writer != threading.get_ident()

    def _know(self, futures: Mapping[str, Future[str]]) -> None:
        with self._news:
            self._futures.update(futures)
            self._news.notify_all()

    def sync(self) -> None:
        """Wait until all is done that was appended. Raises `ProgramError`."""
        if self._is_followed:
            with self._news:
                self._news.wait_for(lambda: self._is_over)
        if not self._is_over:
            self._thread.submit(lambda: None).result()
        if self._error is not None:
            raise self._error

    def text(self) -> str:
        """Return all that was said, without the marks of a chat template: a message a line."""
        self.sync()
        return self._transcript.shown()

    def messages(self) -> Sequence[Message]:
        """Return the messages that are over."""
        self.sync()
        return self._transcript.messages

    def get_meta_info(self, name: str) -> Mapping[str, Any]:
        """Return what is known of the output that is a variable: how it ended, tokens, tokens found in the cache.

        Of one that is no output of this state, nothing is.
        """
        self[name]
        return self._metas.get(name, {})

    def text_iter(self, name: str | None = None) -> Iterator[str]:
        """Yield text as it comes: all of it, or that of one variable. Raises `ProgramError` at its end."""
        for of, text in self._pieces:
            if name is None or of == name:
                yield text
        if self._error is not None:
            raise self._error

    def system(self) -> Any:
        """Return a context within which all belongs to a message of role `system`."""
        return message_of(self, "system")

    def user(self) -> Any:
        """Return the same for role `user`."""
        return message_of(self, "user")

    def assistant(self) -> Any:
        """Return the same for role `assistant`."""
        return message_of(self, "assistant")

    @contextmanager
    def var_scope(self, name: str) -> Iterator[None]:
        """Let a variable be all text that is appended within the context, which must be of one message."""
        future: Future[str] = Future()
        begun: list[int] = []
        self._thread.submit(lambda: begun.append(len(self._transcript.text)))
        yield
        self._know({name: future})
        self._thread.submit(self._guarded, lambda: self._transcript.text[begun[0] :], future)

    def fork(self, size: int = 1) -> Forks:
        """Return branches that begin with all of this, and run beside each other: they share its KV."""
        self.sync()
        variables = {**self._known, **{name: future.result() for name, future in self._futures.items()}}
        said = self._transcript
        branches = [State(self._backend, self._defaults, transcript=said, variables=variables) for _ in range(size)]
        return Forks(self, branches, len(said.shown()))

    def end(self) -> None:
        """Wait for all of it, and let its thread go. No error is raised: see `error`."""
        self._thread.shutdown()
        with self._news:
            self._is_over = True
            self._news.notify_all()
        self._pieces.end()

    def fail(self, error: BaseException) -> None:
        """End it for an error of the program's function."""
        if self._error is None:
            self._error = ProgramError(f"the program failed: {error}")
            self._error.__cause__ = error

    def gather(self, values: Mapping[str, Sequence[Any]]) -> None:
        """Take the variables of branches, as lists."""
        self._known.update(values)
        for name in values:
            self._futures.pop(name, None)

    def _perform(self, part: Expression, future: Future[str]) -> None:
        self._guarded(lambda: self._said(part), future)

    def _guarded(self, work: Callable[[], str], future: Future[str]) -> None:
        if self._error is None:
            try:
                future.set_result(work())
                return
            except Exception as error:
                self._error = ProgramError(str(error))
                self._error.__cause__ = error
        future.set_exception(self._error)

    def _said(self, part: Expression) -> str:
        match part:
            case Text(text):
                self._transcript = self._transcript.with_text(text)
                self._pieces.add("", text)
                return text
            case Gen():
                return self._generated(part)
            case Select():
                return self._selected(part)
            case RoleBegin(role):
                self._transcript = self._transcript.begun(role)
            case RoleEnd(role):
                self._transcript = self._transcript.ended(role)
            case Image(url):
                self._transcript = self._transcript.with_image(url)
            case _:
                raise InvalidRequest(f"{type(part).__name__} has no value here")
        return ""

    def _generated(self, part: Gen) -> str:
        before = self._transcript = self._transcript.tokenized(self._backend)
        made = list(self._made(part if "seed" in part.said else _drawn(part), before))
        if not made:
            raise BackendError("the stream ended without an answer")
        text = "".join(piece.text for piece in made)
        if made[-1].is_exact:
            self._transcript = before.with_output(text, [token for piece in made for token in piece.token_ids])
        else:
            self._transcript = before.with_text(text)
        self._metas[part.name] = made[-1].meta
        return text

    def _made(self, part: Gen, said: Transcript) -> Iterator[Made]:
        prompt, images = said.token_ids, said.image_urls
        if not self._streams:
            made = self._backend.generate(prompt, part.params, images)
            self._pieces.add(part.name, made.text)
            yield made
            return
        with closing(self._backend.stream(prompt, part.params, images)) as pieces:  # type: ignore[type-var]
            for piece in pieces:
                self._pieces.add(part.name, piece.text)
                yield piece

    def _selected(self, part: Select) -> str:
        before = self._transcript = self._transcript.tokenized(self._backend)
        if not before.token_ids:
            raise InvalidRequest("a choice is made behind something: append text, or begin a message", param="choices")
        ids = [tuple(self._backend.encode(choice, is_first=not before.token_ids)) for choice in part.choices]
        scores = self._backend.score(before.token_ids, ids, before.image_urls)
        alone = self._backend.score((), ids) if part.method.wants_alone else [()] * len(ids)
        scored = [ScoredChoice(*each) for each in zip(ids, scores, alone, strict=True)]
        taken = part.method.decide(scored)
        self._transcript = before.with_output(part.choices[taken], ids[taken])
        self._pieces.add(part.name, part.choices[taken])
        means = [sum(each) / max(1, len(each)) for each in scores]
        self._metas[part.name] = {"normalized_prompt_logprobs": means, "input_token_logprobs": scores}
        return part.choices[taken]


def _drawn(part: Gen) -> Gen:
    """Return it with a seed of its own."""
    return replace(part, params=replace(part.params, seed=random.getrandbits(SEED_BITS)))


class Forks(Sequence[State]):
    """Branches of a state, in order."""

    def __init__(self, parent: State, branches: Sequence[State], num_chars: int) -> None:
        self._parent = parent
        self._branches = list(branches)
        self._num_chars = num_chars  # of text that all begin with

    def __iadd__(self, what: Expression | str) -> Forks:
        """Append the same to each."""
        for branch in self._branches:
            branch += what
        return self

    def __getitem__(self, key: Any) -> Any:
        """Return a branch by its number, or a variable of all of them by its name."""
        return [branch[key] for branch in self._branches] if isinstance(key, str) else self._branches[key]

    def __setitem__(self, key: int, branch: State) -> None:
        """Let `forks[0] += ...` be written."""
        assert self._branches[key] is branch

    def __len__(self) -> int:
        return len(self._branches)

    def join(self, how: str = "gather_variable") -> None:
        """Wait for all branches; raises `ProgramError` for one that failed.

        Their variables become lists in the state that they come from; with `concate_and_append` that state goes on
        behind what they have said, one after the other.
        """
        if how not in JOINS:
            raise InvalidRequest(f"join takes {' or '.join(JOINS)}, not {how!r}", param="how")
        for branch in self._branches:
            branch.sync()
        said = [branch.text()[self._num_chars :] for branch in self._branches]
        for branch in self._branches:
            branch.end()
        names = dict.fromkeys(name for branch in self._branches for name in branch.set_names)
        held = {name: [branch.get(name) for branch in self._branches] for name in names}
        self._parent.gather(held)
        if how == "concate_and_append":
            for text in said:
                self._parent += text
