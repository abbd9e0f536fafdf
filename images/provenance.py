"""Prints of what an image was made: an in-toto statement with SLSA's provenance, version 1 each. Standard library only.

https://in-toto.io/Statement/v1, https://slsa.dev/provenance/v1. Its signature is a file beside it
(docs/operations/images.md). Equal builds print equal statements: no time, no name of a machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
DIGEST: Final = re.compile(r"sha256:([0-9a-f]{64})")
BUILD_TYPE: Final = "urn:diptych:images/build.sh:1"


def statement(args: argparse.Namespace) -> dict[str, Any]:
    """Return the document."""
    image, image_digest = args.image
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": image, "digest": digest(image_digest)}, file(args.bill)],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"target": args.target, "options": args.options},
                "resolvedDependencies": list(materials(args)),
            },
            "runDetails": {"builder": {"id": f"urn:diptych:builder:{args.builder}"}},
        },
    }


def materials(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what went into the image: the sources, the base, and the locks, which name every package by hash."""
    base, base_digest = args.base
    sources = {"name": "sources", "digest": {"gitCommit": args.revision} if args.revision != "unknown" else {}}
    return [
        sources,
        {"name": base, "digest": digest(base_digest)},
        *(file(path) for path in (ROOT / "images" / "Dockerfile", *sorted((ROOT / "locks").glob("*.lock")))),
    ]


def digest(text: str) -> dict[str, str]:
    """Return what a builder says of an image; nothing where it does not know."""
    found = DIGEST.fullmatch(text)
    return {"sha256": found[1]} if found else {}


def file(path: Path) -> dict[str, Any]:
    name = path.relative_to(ROOT) if path.is_absolute() else path
    return {"name": str(name), "digest": {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--image", nargs=2, metavar=("TAG", "DIGEST"), required=True)
    parser.add_argument("--base", nargs=2, metavar=("NAME", "DIGEST"), required=True)
    parser.add_argument("--bill", type=Path, required=True)
    for name in ("revision", "target", "builder"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--options", default="")
    print(json.dumps(statement(parser.parse_args()), indent=1))


if __name__ == "__main__":
    main()
