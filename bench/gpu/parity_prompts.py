"""Fifty prompts of many lengths: shorter than a page, of several, of several steps, some with a prefix in common."""

from __future__ import annotations

from typing import Final

TOPICS: Final = (
    *("the capital of France", "how plants make sugar", "a sorting algorithm", "the tides", "why bread rises"),
    *("prime numbers", "the water cycle", "a short poem about rain", "how to repair a bicycle tyre", "volcanoes"),
)
FRAMES: Final = (
    "{}",
    "Tell me about {}.",
    "You are a patient teacher. A pupil of ten years asks about {}. First you say what everybody sees, then",
    "Question: what should one know about {}?\nAnswer in three sentences.\nAnswer:",
)
LESSON: Final = "Here is part {} of the notes on {}: read it slowly, think about it, and go on to the next one. "
LONG_PARTS: Final = (4, 6, 9, 12, 16, 20, 25, 30, 33, 40)  # of lessons, 22 tokens or so each


def prompts() -> list[str]:
    short = [frame.format(topic) for frame in FRAMES for topic in TOPICS]
    return short + [
        "".join(LESSON.format(part, topic) for part in range(1, parts + 1))
        for topic, parts in zip(TOPICS, LONG_PARTS, strict=True)
    ]
