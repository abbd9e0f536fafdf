"""What can be wrong with a request, each found before a worker hears of it. Pure; raises the caller's error."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from diptych.common.errors import InvalidRequest
from diptych.generation.insight import most_state_tokens, validate_states
from diptych.generation.leg_prompt import words_far_too_long, words_too_long
from diptych.router.errors import ContextLengthExceeded, ModelNotFound
from diptych.router.keys.caller import Caller
from diptych.router.values.request import POOL_HEADER, ChatPrompt, ClientRequest, Prompt, RowsPrompt, ServedModel

MAX_MESSAGES: Final = 4096  # of a chat
MAX_PARTS: Final = 1024  # of a message: of its content, and calls
MAX_TOOLS: Final = 128
MAX_INPUTS: Final = 2048  # that a request may want vectors of, as OpenAI's API has it
MAX_TOKENS: Final = 2**20  # that a client may send
MAX_ROW_BYTES: Final = 48 << 20  # of a prompt: a message to a worker holds 64 MiB
MAX_PAIRED_TOKENS: Final = 2**24  # of all pairs of a request, with a query in each: 64 MiB
WAYS: Final = {"embed": "/v1/embeddings, /v1/score or /v1/rerank", "classify": "/classify, /v1/score or /v1/rerank"}
ROLES: Final = ("system", "user", "assistant", "tool")


def check_model(name: str, model: ServedModel, model_ids: Sequence[str], adapters: Collection[str]) -> None:
    """Raise `ModelNotFound` unless a request may name this; empty: the only model."""
    if name and name not in (*model.names, *model_ids, *adapters):
        served = " and ".join(model.names or model_ids)
        raise ModelNotFound(f"the model {name!r} does not exist; this router serves {served}")


def check_request(
    client: ClientRequest, model: ServedModel, model_ids: Sequence[str], adapters: Collection[str], max_choices: int
) -> None:
    """What can be said without looking at the prompt."""
    check_model(client.model, model, model_ids, adapters)
    _check_purpose(client, model)
    _check_images(client, model)
    _check_rows(client, model)
    _check_counts(client, max_choices)
    client.account.validate()
    _check_priority(client.account.priority, client.caller)
    if client.tool_use.is_forced and client.params.grammar is not None:
        text = "a call that must be made leaves no room for another shape of the output: give one of the two"
        raise InvalidRequest(text, param="tool_choice")
    if client.tool_use.is_forced and client.params.allowed_token_ids:
        text = "a call that must be made may need other tokens: give one of allowed_token_ids and tool_choice"
        raise InvalidRequest(text, param="allowed_token_ids")
    max_tokens = client.max_tokens or default_max_tokens(client, model.hidden_size, model.context_len)
    client.params.validate_with(max_tokens)
    if client.params.attention is not None:
        client.params.attention.validate(max_tokens, client.num_requests)
    if client.params.hidden_states:
        validate_states(model.hidden_size, max_tokens, client.num_requests)
    client.params.validate_for(model.vocab_size)


def default_max_tokens(client: ClientRequest, hidden_size: int, room: int) -> int:
    """Return how long an output may get of which nothing is said: what the context leaves, and all can be told of."""
    wish, num_outputs = client.params.attention, client.num_requests
    bounds = [room] if wish is None else [room, wish.most_tokens(num_outputs)]
    if client.params.hidden_states:
        bounds.append(most_state_tokens(hidden_size, num_outputs))
    return max(1, min(bounds))


def check_pool(name: str, pools: Collection[str]) -> None:
    """Raise unless a request may name this pool."""
    if name and name not in pools:
        there = ", ".join(sorted(pools)) or "none"
        raise InvalidRequest(f"no pool {name!r} is declared; there is: {there}", param=POOL_HEADER)


def _check_purpose(client: ClientRequest, model: ServedModel) -> None:
    """Each model makes text or vectors."""
    if model.pooling is None and client.vectors is not None and not client.vectors.labels:
        text = f"{model.model_id} makes text, no vectors: ask for chat or completions, or serve an embedding model"
        raise InvalidRequest(text, param="model")
    if model.pooling is not None and client.vectors is None:
        text = f"{model.model_id} makes no text: ask for {WAYS[model.pooling.purpose]}"
        raise InvalidRequest(text, param="model")


def _check_images(client: ClientRequest, model: ServedModel) -> None:
    """What else can be asked for beside images. Their number and where they are is the reader's matter."""
    images = client.images
    if not images:
        return
    if model.vision is None:
        raise InvalidRequest(f"{model.model_id} takes no images: send text only", param=images[0].param)
    params = client.params
    if client.echo or (params.prompt_logprobs is not None and not params.prompt_logprobs_start):
        words = "a prompt with images has no text or log-probabilities to show: leave out echo and prompt_logprobs"
        raise InvalidRequest(words, param="echo" if client.echo else "prompt_logprobs")
    if client.follow is not None:
        raise InvalidRequest("a turn of a session takes no images", param="session_params")


def _check_rows(client: ClientRequest, model: ServedModel) -> None:
    """What else can be asked for beside rows, and how wide they are."""
    rows = [prompt for prompt in client.prompts if isinstance(prompt, RowsPrompt)]
    if not rows:
        return
    size = model.hidden_size
    if (width := next((each.width for each in rows if each.width != size), size)) != size:
        words = f"a row of input_embeds has {size} numbers, the hidden size of {model.model_id}, not {width}"
        raise InvalidRequest(words, param="input_embeds")
    if client.echo or client.params.prompt_logprobs is not None:
        words = "rows of input_embeds are no tokens, and have no text or log-probabilities to show"
        raise InvalidRequest(f"{words}: leave out echo, logprob_start_len and prompt_logprobs", param="input_embeds")
    if client.follow is not None:
        raise InvalidRequest("a turn of a session takes no input_embeds: give text or input_ids", param="input_embeds")
    for each in rows:
        if len(each.data) > MAX_ROW_BYTES:
            words = f"the rows of input_embeds take {len(each.data)} bytes: give {MAX_ROW_BYTES} at most, so fewer rows"
            raise InvalidRequest(words, param="input_embeds")
        output_room(each, each.num_rows, model.context_len)  # before any is read


def _check_priority(priority: int, caller: Caller) -> None:
    if priority > caller.max_priority:
        text = (
            f"the key {caller.name!r} may ask for a priority of at most {caller.max_priority}, not {priority}: "
            "leave it out, or ask the operator for a higher `max_priority`"
        )
        raise InvalidRequest(text, param="priority")


def _check_counts(client: ClientRequest, max_choices: int) -> None:
    if not 1 <= client.num_choices <= max_choices:
        raise InvalidRequest(f"n must be between 1 and {max_choices}, not {client.num_choices}", param="n")
    if not client.num_choices <= client.num_made <= max_choices:
        text = f"best_of must be between n ({client.num_choices}) and {max_choices}, not {client.best_of}"
        raise InvalidRequest(text, param="best_of")
    if client.max_tokens is not None and client.max_tokens < 1:
        raise InvalidRequest(f"max_tokens must be at least 1, not {client.max_tokens}", param="max_tokens")


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InvalidRequest("messages is empty: give at least one message", param="messages")
    for index, message in enumerate(messages):
        if message["role"] not in ROLES:
            text = f"role must be one of {', '.join(ROLES)}, not {message['role']!r}"
            raise InvalidRequest(text, param=f"messages[{index}].role")


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):  # two quick passes over what may be a long prompt
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise InvalidRequest(f"{wrong} is not a token: ids are 0 to {vocab_size - 1}", param="prompt")


def to_utf8(text: str) -> bytes:
    """A lone surrogate has no such form."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"text is not valid Unicode: {error}", param="prompt") from None


def check_not_empty(ids: Sequence[int]) -> None:
    if not ids:
        raise InvalidRequest("the prompt is empty: give at least one token", param="prompt")


def output_room(prompt: Prompt, prompt_len: int, context_len: int) -> int:
    """Return how many tokens of output the context leaves, at least one."""
    room = context_len - prompt_len
    if room < 1:
        raise ContextLengthExceeded(words_too_long(prompt_len, context_len), param=param_of(prompt))
    return room


def check_len(prompt_len: int, context_len: int) -> None:
    """A prompt without output may take all of the context."""
    if prompt_len > context_len:
        words = f"the prompt has {prompt_len} tokens; this model takes {context_len} at most"
        raise ContextLengthExceeded(f"{words}: shorten it, or give truncate_prompt_tokens", param="input")


def check_total(num_tokens: int) -> None:
    """A long query is in the prompt of each of its documents."""
    if num_tokens > MAX_PAIRED_TOKENS:
        words = f"the prompts of one request may have {MAX_PAIRED_TOKENS} tokens together: send fewer documents at once"
        raise InvalidRequest(words, param="input")


def far_too_long(prompt: Prompt, max_tokens: int) -> ContextLengthExceeded:
    """Return the error of a prompt that was not tokenised to its end."""
    return ContextLengthExceeded(words_far_too_long(max_tokens), param=param_of(prompt))


def param_of(prompt: Prompt) -> str:
    """Return which field of a client's request a prompt is."""
    if isinstance(prompt, RowsPrompt):
        return "input_embeds"
    return "messages" if isinstance(prompt, ChatPrompt) else "prompt"
