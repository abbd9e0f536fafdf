"""A model's tower: from the pixels of an image to rows of hidden states, which stand in its places of the prompt.

Products are those of `Ops`, attention is torch's. It keeps nothing: an image is computed at once, alone, so that its
rows do not depend on what else is in a step. On a GPU all of it is queued on the step's stream: nobody waits.

Source of the layers: the towers of Qwen2.5-VL (arXiv 2502.13923) and Qwen3-VL, and SigLIP (arXiv 2303.15343).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from diptych.architectures.tower import Tower, TowerActivation
from diptych.architectures.tower_placement import TARGET
from diptych.architectures.vision import VisionInput
from diptych.common.arrays import I64
from diptych.engine.attention.torch_backend import rotate
from diptych.engine.models.matrices.matrix import Matrix
from diptych.engine.models.matrices.weights import Weights
from diptych.generation.segments import Image

NORM_EPS: Final = 1e-6
THETA: Final = 10_000.0
_ACTIVATIONS: Final[Mapping[TowerActivation, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class VisionTower:
    """The tower of a loaded model."""

    def __init__(self, tower: Tower, vision: VisionInput, weights: Weights, dtype: torch.dtype) -> None:
        self._tower, self._dtype = tower, dtype
        self._activation = _ACTIVATIONS[tower.activation]
        self._matrices = {name: weights.matrix(name) for name in _matrices(tower)}
        self._positions = weights.matrix(f"{TARGET}positions") if tower.num_positions else None
        biased = [f"{name}_bias" for name in (f"{TARGET}patches", *self._matrices, *_norms(tower))]
        self._biases = {name: weights.vector(name) for name in biased}
        self._norms = {name: weights.constant(name) for name in _norms(tower)}
        self._mean_norm = weights.norm(f"{TARGET}mean.norm") if tower.is_averaged else None
        kernel = weights.constant(f"{TARGET}patches")
        frames = kernel.float().view(*kernel.shape[:2], -1, tower.patch_size**2)
        self._kernel = frames.sum(2).flatten(1).to(dtype)  # an image's frames are equal
        device = kernel.device
        self._mean, self._std = (
            255 * torch.tensor(each, dtype=torch.float32, device=device)
            for each in (vision.image_mean, vision.image_std)
        )
        exponents = torch.arange(0, tower.head_dim // 2, 2, dtype=torch.float32) / (tower.head_dim // 2)
        self._frequencies = (1.0 / THETA**exponents).to(device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the type of rows."""
        return self._dtype

    def rows_shape(self, image: Image) -> tuple[int, int, int]:
        """Return the shape of what `encode` returns."""
        side, tower = self._tower.patch_size * self._tower.merge_size, self._tower
        return 1 + len(tower.taps), (image.height // side) * (image.width // side), tower.out_size

    def encode(self, image: Image, on_layer: Callable[[], None] = lambda: None) -> Tensor:
        """Return `[1 + num_taps, num_rows, out_size]`: a row for each place of the prompt, from left to right and down.

        And those that are added to what the first layers of the text return there. `on_layer` is called behind each.
        """
        tower = self._tower
        grid = image.height // tower.patch_size, image.width // tower.patch_size
        x, taps = F.linear(self._patches(image), self._kernel, self._biases[f"{TARGET}patches_bias"]), []
        if self._positions is not None:
            x = x + self._learned(self._positions, grid)
        turning = self._turning(grid) if tower.rotates else None
        everywhere = [torch.arange(len(x), device=x.device)[None]]
        windows = [brought(each, x.device) for each in window_patches(grid, tower.merge_size, tower.window)]
        for layer in range(tower.num_layers):
            seen = everywhere if not tower.window or layer in tower.full_layers else windows
            x = self._layer(x, f"{TARGET}{layer}.", seen, turning)
            if layer in tower.taps:
                taps.append(self._merged(x, f"{TARGET}tap.{tower.taps.index(layer)}", norms_joined=True))
            on_layer()
        if self._mean_norm is not None:
            return self._averaged(x, self._mean_norm)[None]
        return torch.stack([self._merged(x, f"{TARGET}merge", norms_joined=False), *taps])

    def _patches(self, image: Image) -> Tensor:
        """Return `[num_patches, 3 * patch_size**2]`, normed; the patches of a row of the result lie together."""
        tower, device = self._tower, self._kernel.device
        patch, merge = tower.patch_size, tower.merge_size
        pixels = brought(np.frombuffer(bytearray(image.rgb), np.uint8), device).view(image.height, image.width, 3)
        normed = (pixels.float() - self._mean) / self._std
        rows, columns = image.height // patch // merge, image.width // patch // merge
        parted = normed.view(rows, merge, patch, columns, merge, patch, 3)
        return parted.permute(0, 3, 1, 4, 6, 2, 5).reshape(rows * columns * merge**2, 3 * patch**2).to(self._dtype)

    def _turning(self, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, `[num_patches, 1, head_dim / 2]`: first those of heights, then of widths."""
        places = brought(patch_places(grid, self._tower.merge_size), self._frequencies.device)
        angles = (places[..., None].float() * self._frequencies).transpose(0, 1).flatten(1)
        return angles.cos()[:, None], angles.sin()[:, None]

    def _layer(self, x: Tensor, name: str, seen: Sequence[Tensor], turning: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self._attend(self._norm(x, f"{name}norm1"), name, seen, turning)
        inner = self._product(
            self._norm(x, f"{name}norm2"), f"{name}up", self._tower.ffn_size * (1 + self._tower.gated)
        )
        activated = self._activation(inner[:, : self._tower.ffn_size])
        inner = activated * inner[:, self._tower.ffn_size :] if self._tower.gated else activated
        return x + self._product(inner, f"{name}down", self._tower.hidden_size)

    def _attend(self, x: Tensor, name: str, seen: Sequence[Tensor], turning: tuple[Tensor, Tensor] | None) -> Tensor:
        """`seen`: `[num_windows, num_patches]` for each size of windows: patches see those of their own one."""
        heads = self._tower.num_heads
        states = self._product(x, f"{name}qkv", 3 * self._tower.hidden_size).view(len(x), 3 * heads, -1)
        if turning is not None:
            rotate(states[:, : 2 * heads], *turning)
        found = torch.empty_like(x)
        for patches in seen:
            queries, keys, values = torch.split(states[patches].transpose(1, 2), heads, dim=1)
            attended = F.scaled_dot_product_attention(queries, keys, values)
            found[patches] = attended.transpose(1, 2).flatten(2)
        return self._product(found, f"{name}o", self._tower.hidden_size)

    def _merged(self, x: Tensor, name: str, *, norms_joined: bool) -> Tensor:
        size = self._tower.merged_size
        joined = self._norm(x.view(-1, size) if norms_joined else x, f"{name}.norm").view(-1, size)
        inner = F.gelu(self._product(joined, f"{name}.up", size))
        return self._product(inner, f"{name}.down", self._tower.out_size)

    def _averaged(self, x: Tensor, norm: Tensor) -> Tensor:
        """Return the rows of a tower whose patches become one as their mean."""
        means = self._norm(x, f"{TARGET}last").view(-1, self._tower.merge_size**2, x.shape[1]).mean(1)
        normed = F.rms_norm(means.float(), norm.shape, norm.float(), NORM_EPS).to(x.dtype)
        return self._product(normed, f"{TARGET}mean.down", self._tower.out_size)

    def _learned(self, positions: Matrix, grid: tuple[int, int]) -> Tensor:
        """Return `[num_patches, hidden_size]`: the square of learned positions, stretched to the image's corners."""
        side = math.isqrt(self._tower.num_positions)
        places = brought(patch_places(grid, self._tower.merge_size), self._kernel.device).float()
        ends = max(1, grid[0] - 1), max(1, grid[1] - 1)
        at = torch.stack([axis * (side - 1) / end for axis, end in zip(places, ends, strict=True)])
        first = at.floor()
        parts = torch.stack((first + 1 - at, at - first))  # of the position before, and of the next
        rows, columns = torch.stack((first, (first + 1).clamp(max=side - 1))).long().unbind(1)
        ids = (rows[:, None] * side + columns[None]).flatten(0, 1)  # [4, num_patches]
        weights = (parts[:, None, 0] * parts[None, :, 1]).flatten(0, 1)
        found = positions.rows(ids.flatten()).view(*ids.shape, -1)
        return (found * weights[..., None]).sum(0).to(self._dtype)

    def _product(self, x: Tensor, name: str, num_rows: int) -> Tensor:
        out, bias = x.new_empty(len(x), num_rows), self._biases[f"{name}_bias"]
        self._matrices[name].multiply(x.contiguous(), out)
        return out if bias is None else out.add_(bias)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self._norms[name], self._biases[f"{name}_bias"]
        if bias is None:
            return F.rms_norm(x, (x.shape[-1],), weight, NORM_EPS)
        return F.layer_norm(x, (x.shape[-1],), weight, bias, NORM_EPS)


def brought(array: npt.NDArray[Any], device: torch.device) -> Tensor:
    """Return an array on the device. Of a GPU nobody waits: the copy is queued behind what it does already."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def _matrices(tower: Tower) -> list[str]:
    of_layers = [f"{TARGET}{layer}.{name}" for layer in range(tower.num_layers) for name in ("qkv", "o", "up", "down")]
    behind = ("down",) if tower.is_averaged else ("up", "down")
    return [*of_layers, *(f"{name}.{which}" for name in _mergers(tower) for which in behind)]


def _norms(tower: Tower) -> list[str]:
    of_layers = [f"{TARGET}{layer}.{name}" for layer in range(tower.num_layers) for name in ("norm1", "norm2")]
    return [*of_layers, *([f"{TARGET}last"] if tower.is_averaged else [f"{name}.norm" for name in _mergers(tower)])]


def _mergers(tower: Tower) -> list[str]:
    if tower.is_averaged:
        return [f"{TARGET}mean"]
    return [f"{TARGET}merge", *(f"{TARGET}tap.{tap}" for tap in range(len(tower.taps)))]


def patch_places(grid: tuple[int, int], merge_size: int) -> I64:
    """Return `[2, num_patches]`: heights and widths of the patches of a grid, those that are merged together."""
    places: I64 = np.indices(grid, np.int64)
    rows, columns = grid[0] // merge_size, grid[1] // merge_size
    return places.reshape(2, rows, merge_size, columns, merge_size).swapaxes(2, 3).reshape(2, -1).copy()


def window_patches(grid: tuple[int, int], merge_size: int, window: int) -> list[I64]:
    """Return the patches of each window of `window` rows of the result in its side, `[num_windows, num_patches]`.

    Windows begin at the upper left; those at the other edges may be smaller, so there are one to four sizes.
    """
    if not window:
        return []
    rows, columns = grid[0] // merge_size, grid[1] // merge_size
    numbers = np.arange(rows * columns * merge_size**2).reshape(rows, columns, merge_size**2)
    cut = [
        numbers[top : top + window, left : left + window].ravel()
        for top in range(0, rows, window)
        for left in range(0, columns, window)
    ]
    sizes = sorted({len(each) for each in cut}, reverse=True)
    return [np.stack([each for each in cut if len(each) == size]) for size in sizes]
