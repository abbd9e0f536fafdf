from __future__ import annotations

import pytest

from diptych.checkpoints.source import open_model
from diptych.common.errors import ConfigError
from diptych.engine.sim.answers import vocabulary_of
from diptych.engine.sim.hardware import SimulatedModel

MESSAGES = [{"role": "user", "content": "Grüße 😀"}]


def test_the_built_in_model_has_bytes_for_tokens() -> None:
    tokenizer = open_model("sim").tokenizer()
    text = "Grüße 😀\n\x00"
    assert tokenizer.encode(text) == list(text.encode())
    assert tokenizer.decode(text.encode()) == text
    prompt = tokenizer.encode(tokenizer.apply_chat_template(MESSAGES))
    assert (prompt[0], prompt.count(257), tokenizer.eos_ids) == (256, 1, (257,))


def test_it_speaks_in_words_and_ends_with_the_end_of_an_answer() -> None:
    model = open_model("sim")
    vocabulary = vocabulary_of(model.tokenizer(), model.config.vocab_size)
    assert bytes(vocabulary.ids[:-1].tolist()).decode().replace(" ", "0").isalnum()
    assert vocabulary.eos_id == 257


def test_nothing_but_a_simulation_runs_it() -> None:
    with pytest.raises(ConfigError, match="--device sim"):
        open_model("sim").tensors()


def test_a_simulated_model_pairs_with_simulated_ones_only() -> None:
    source = open_model("sim")
    simulated = SimulatedModel(source)
    assert simulated.weights_id != source.weights_id
    assert simulated.weights_id == SimulatedModel(source).weights_id
    assert (simulated.config, simulated.tokenizer().to_json()) == (source.config, source.tokenizer().to_json())
