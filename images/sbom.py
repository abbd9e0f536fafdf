"""Prints the Python packages of a folder as a software bill of materials: CycloneDX 1.6, JSON. Standard library only.

python images/sbom.py /opt/diptych/lib/python3.12/site-packages
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, distributions
from typing import Any


def bill(packages: Iterable[Distribution]) -> dict[str, Any]:
    """Return the document; the same packages always give the same one."""
    components = sorted((_component(each) for each in packages), key=lambda component: str(component["name"]))
    return {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": components}


def _component(package: Distribution) -> dict[str, Any]:
    name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
    purl = f"pkg:pypi/{name}@{package.version}"
    component = {"type": "library", "bom-ref": purl, "name": name, "version": package.version, "purl": purl}
    license_name = _license(package)
    return component | ({"licenses": [{"license": {"name": license_name}}]} if license_name else {})


def _license(package: Distribution) -> str:
    """As the package states it: an expression, a classifier, or the first line of a text."""
    metadata = package.metadata
    classifiers = metadata.get_all("Classifier") or []
    classified = [each.rpartition(" :: ")[2] for each in classifiers if each.startswith("License :: ")]
    stated = [*(metadata.get_all("License-Expression") or []), *classified, *(metadata.get_all("License") or [])]
    return next((each.splitlines()[0] for each in stated if each), "")


if __name__ == "__main__":
    json.dump(bill(distributions(path=sys.argv[1:])), sys.stdout, indent=1)
    print()
