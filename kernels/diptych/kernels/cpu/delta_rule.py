"""The gated delta rule behind a short convolution (arXiv 2412.06464), token by token. All floats are float32, dense."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from typing import Final

import torch
from torch import Tensor

from diptych.common.errors import ConfigError
from diptych.kernels.cpu.library import address, load, slots_of

MAX_CHANNELS: Final = 8192  # of a key head, times `conv_width`; as in C
MAX_TAPS: Final = 8


class _Net(ctypes.Structure):
    """`struct delta_net`."""

    _fields_ = (
        ("num_key_heads", c_int64),
        ("num_value_heads", c_int64),
        ("key_dim", c_int64),
        ("value_dim", c_int64),
        ("conv_width", c_int64),
        ("conv", c_void_p),
        ("decay", c_void_p),
        ("decay_bias", c_void_p),
        ("norm", c_void_p),
        ("eps", c_float),
    )


class DeltaRuleKernel:
    """One layer's. Results are the same bits in any batch, and however a request's text is cut."""

    def __init__(
        self,
        num_key_heads: int,
        num_value_heads: int,
        key_dim: int,
        *,
        conv: Tensor,
        decay: Tensor,
        decay_bias: Tensor,
        norm: Tensor,
        eps: float,
    ) -> None:
        """`conv` `[num_channels, conv_width]`, `decay` and `decay_bias` `[num_value_heads]`, `norm` `[value_dim]`.

        Raises `ConfigError` for a net that is too large.
        """
        value_dim, width = len(norm), conv.shape[1]
        channels = 2 * num_key_heads * key_dim + num_value_heads * value_dim
        assert len(conv) == channels, (conv.shape, channels)
        assert decay.shape == decay_bias.shape == (num_value_heads,), (decay.shape, decay_bias.shape)
        if width > MAX_TAPS or channels // num_key_heads * width > MAX_CHANNELS:
            raise ConfigError(
                f"the C kernels compute no delta net of {channels} channels and {width} taps; use 'torch'"
            )
        self._tensors = conv.T.contiguous(), decay, decay_bias, norm  # the structure has their addresses
        sizes = num_key_heads, num_value_heads, key_dim, value_dim, width
        self._net = _Net(*sizes, *map(address, self._tensors), eps)
        self._states = (channels, width - 1), (num_value_heads, key_dim, value_dim)
        self._widths = channels + num_value_heads * (value_dim + 2), num_value_heads * value_dim

    def mix(self, projected: Tensor, newest: Tensor, kept: Tensor, starts: Tensor, slots: Tensor, out: Tensor) -> None:
        """Mix the tokens of each request with its states, and bring those up to date, in place.

        `projected`: `[num_tokens, channels | gates | numbers of beta | of g]`; `newest`: `[num_slots, num_channels,
        conv_width - 1]`; `kept`: `[num_slots, num_value_heads, key_dim, value_dim]`; `out`: `[num_tokens,
        num_value_heads * value_dim]`. `starts`, int64 `[batch_size + 1]`: each request's first token, and behind them
        where the last ones end; `slots`, int64 `[batch_size]`, no two alike.
        """
        assert (projected.shape, out.shape) == tuple((len(out), width) for width in self._widths), projected.shape
        assert (newest.shape[1:], kept.shape[1:]) == self._states, (newest.shape, kept.shape)
        assert starts.dtype == slots.dtype == torch.int64, (starts.dtype, slots.dtype)
        assert len(starts) == len(slots) + 1, (starts.shape, slots.shape)
        states = *slots_of(newest), *slots_of(kept)
        steps = starts.data_ptr(), slots.data_ptr(), len(slots)
        result = load().diptych_delta_rule(ctypes.byref(self._net), address(projected), *states, *steps, address(out))
        assert result == 0, result
