"""Formats of quantised weights: from the bytes of a checkpoint to codes and scales, without rounding. numpy only."""
