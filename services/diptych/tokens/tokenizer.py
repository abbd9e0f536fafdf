"""Text to token ids and back, and chat messages to text. Safe to share between threads.

`cut_points` decides where a text may be cut so that its parts, tokenised one by one, give what the whole gives.
A tokenizer first takes the added tokens that are not `normalized` out of the raw text; each piece between two of them
is normalised, pre-tokenised and merged without a look at the others. So a cut right before such a token changes
nothing, as long as the token is found there whatever stands before it. It is not when it takes white space on its
left, when it must be a word of its own, or when another token may begin before it and reach into it.
Rule: a tokenizer for which that can't be told has no cut points, and its texts are tokenised whole.

`ShowingTokenizer` decodes some special tokens as the texts that they are, for who must see them: the marks of calls and
reasoning.

`TokenLength` tells by the length of a text how few tokens it may have: one that is far too long needs no other look.
Rule: only where it is known which bytes are in some token. A normaliser may drop characters, an unknown token may stand
for any number of them, and so may an added token that takes the white space beside it: then nothing is told. A
vocabulary that lacks some control characters drops them; of every other character at least its last byte is kept.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import tokenizers
from tokenizers import models
from tokenizers.decoders import ByteLevel

from diptych.common.errors import InvalidRequest
from diptych.tokens.detokenizer import ByteDetokenizer, Detokenizer, IncrementalDetokenizer
from diptych.tokens.token_bytes import TextBytes, TokenBytes, byte_alphabet

if TYPE_CHECKING:
    from diptych.tokens.chat_template import ChatTemplate, Message

KEEPING: Final = frozenset({"ByteLevel", "Digits", "Split"})  # pre-tokenizers; a split that removes is none of them
ASCII: Final = 0x80
LAST_BYTES: Final = range(0x80, 0xC0)  # of all other characters in UTF-8


def stay_in_the_callers_thread() -> None:
    """Keep the library from threads of its own, one a core: who calls it says how many threads tokenise."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class Tokenizer:
    """A model's tokenizer. Special tokens written out in a text become their single ids, as a chat prompt needs."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Sequence[int],
        chat_template: str | None,
        special_tokens: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """`special_tokens` are what a template may name: bos_token, eos_token, ..."""
        self._backend = backend
        self._template = chat_template
        self._special_tokens = special_tokens
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.token_bytes = TokenBytes(backend)
        self._text_bytes = TextBytes(backend) if isinstance(backend.decoder, ByteLevel) else None

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The model's own. Only routers show chats: workers neither compile it nor import what does.

        Raises `ConfigError` where it does not compile.
        """
        from diptych.tokens.chat_template import ChatTemplate

        return ChatTemplate(self._template, self._special_tokens) if self._template else None

    @property
    def special_tokens(self) -> frozenset[str]:
        """Those that have no text unless they are shown."""
        added = self._backend.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return token ids. `add_special_tokens` puts the model's BOS in front, where the model has that habit."""
        return self.encode_all([text], add_special_tokens=add_special_tokens)[0]

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Return the tokens of two texts, put together as the tokenizer does it. Raises `InvalidRequest`."""
        try:
            ids: list[int] = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)[0].ids
        except (UnicodeError, TypeError) as error:
            raise InvalidRequest(f"text is not valid Unicode: {error}") from None
        return ids

    def separator(self) -> int | None:
        """Return the token behind which the second text of a pair begins, by types of tokens; None: there is none."""
        encoding = self._backend.encode("a", "b")
        if 1 not in encoding.type_ids[1:]:
            return None
        return int(encoding.ids[encoding.type_ids.index(1) - 1])

    def encode_all(self, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
        """Return the token ids of each text. Other threads run meanwhile: the library's `encode` would stop them."""
        try:
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        except (UnicodeError, TypeError) as error:  # a lone surrogate has no UTF-8 form
            raise InvalidRequest(f"text is not valid Unicode: {error}") from None
        return [encoding.ids for encoding in encodings]

    def cut_points(self) -> re.Pattern[str] | None:
        """Return what matches the tokens before which a text may be cut without a change of its tokens; None: none."""
        added = list(self._backend.get_added_tokens_decoder().values())
        if not _is_local(self._backend) or any(token.single_word for token in added):
            return None
        raw = [token for token in added if not token.normalized and token.content]
        cuts = {token.content for token in raw if token.special and _stands_alone(token)}
        others = {token.content for token in raw} - cuts
        if not cuts or any(_reaches_into(other, cut) for other in others for cut in cuts):
            return None
        longest_first = sorted(cuts, key=len, reverse=True)  # as it matches, of two that begin at the same place
        return re.compile("|".join(map(re.escape, longest_first)))

    def token_length(self) -> TokenLength | None:
        """Return what a text's length tells of the number of its tokens; None: nothing."""
        return token_length(self._backend)

    def longest_word(self) -> int:
        """Return how many characters a word may have that is more than one unknown token; 0: as many as there are."""
        model = self._backend.model
        return int(model.max_input_chars_per_word) if isinstance(model, models.WordPiece) else 0

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Return text; bytes that are not (yet) UTF-8 become U+FFFD, ids outside the vocabulary nothing."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def detokenizer(self) -> Detokenizer:
        """Return what makes text of one request's tokens as they come."""
        return IncrementalDetokenizer(self) if self._text_bytes is None else ByteDetokenizer(self._text_bytes)

    def showing(self, tokens: Collection[str]) -> Tokenizer | ShowingTokenizer:
        """Return what decodes these tokens as the texts that they are, should they be special."""
        if self.special_tokens.isdisjoint(tokens):
            return self
        return ShowingTokenizer(self._backend, tokens, self.eos_ids)

    def with_chat_template(self, source: str) -> Tokenizer:
        """Return the same with another template. Raises `ConfigError` where it does not compile."""
        from diptych.tokens.chat_template import ChatTemplate

        other = copy.copy(self)
        other.chat_template = ChatTemplate(source, self._special_tokens)
        return other

    def to_json(self) -> str:
        """Return what `tokenizer.json` would hold."""
        return self._backend.to_str()

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        parameters: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the prompt for `messages`; encode it without `add_special_tokens`, it carries its own."""
        if self.chat_template is None:
            raise InvalidRequest("this model has no chat template: use completions with a plain prompt")
        return self.chat_template.render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, parameters=parameters
        )


def _is_local(backend: tokenizers.Tokenizer) -> bool:
    """Whether nothing depends on the length of the text, or on chance."""
    is_random = bool(getattr(backend.model, "dropout", None))
    return not (is_random or backend.truncation or backend.padding or backend.encode_special_tokens)


def _stands_alone(token: tokenizers.AddedToken) -> bool:
    return not token.lstrip and not token.content[0].isspace()


def _reaches_into(other: str, cut: str) -> bool:
    """Whether `other` may be found where a part of it is (a part of) `cut`."""
    return cut in other or any(other.endswith(cut[:length]) for length in range(1, len(cut)))


class ShowingTokenizer:
    """A tokenizer as far as output needs one. Special tokens that are not to be shown have no text, as ever."""

    def __init__(self, backend: tokenizers.Tokenizer, shown: Collection[str], eos_ids: tuple[int, ...]) -> None:
        added = backend.get_added_tokens_decoder().items()
        self._backend = backend
        self._hidden = frozenset(key for key, token in added if token.special and token.content not in shown)
        self._text_bytes = TextBytes(backend, shown) if isinstance(backend.decoder, ByteLevel) else None
        self.eos_ids = eos_ids

    def decode(self, ids: Iterable[int]) -> str:
        shown = [token_id for token_id in ids if token_id not in self._hidden]
        text: str = self._backend.decode(shown, skip_special_tokens=False)
        return text

    def detokenizer(self) -> Detokenizer:
        return IncrementalDetokenizer(self) if self._text_bytes is None else ByteDetokenizer(self._text_bytes)


@dataclass(frozen=True, slots=True)
class TokenLength:
    """The lengths of the tokens of one vocabulary."""

    longest: int  # bytes of a token
    dropped: str  # characters that are in none

    def least_tokens(self, text: str) -> int:
        """Return what a text has at least. No character has less than a byte."""
        num_kept = len(text) - sum(map(text.count, self.dropped))
        return -(-num_kept // self.longest)


def token_length(backend: tokenizers.Tokenizer) -> TokenLength | None:
    """Return what can be told; None where nothing can."""
    if backend.normalizer is not None or backend.truncation or not isinstance(backend.model, models.BPE):
        return None
    added = list(backend.get_added_tokens_decoder().values())
    if backend.model.unk_token or not _keeps_bytes(backend) or any(token.lstrip or token.rstrip for token in added):
        return None
    pieces = backend.get_vocab(with_added_tokens=False)
    missing = {byte for char, byte in byte_alphabet().items() if char not in pieces}
    if not missing.isdisjoint(LAST_BYTES):
        return None
    longest = max(*map(len, pieces), *(len(token.content.encode()) for token in added))
    return TokenLength(longest, "".join(chr(byte) for byte in sorted(missing) if byte < ASCII))


def _keeps_bytes(backend: tokenizers.Tokenizer) -> bool:
    steps = list(_steps(json.loads(backend.pre_tokenizer.__getstate__()))) if backend.pre_tokenizer else []
    kinds = {step["type"] for step in steps}
    return "ByteLevel" in kinds <= KEEPING and all(step.get("behavior") != "Removed" for step in steps)


def _steps(step: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if step["type"] == "Sequence":
        for each in step["pretokenizers"]:
            yield from _steps(each)
    else:
        yield step
