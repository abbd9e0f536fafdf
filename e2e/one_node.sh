#!/bin/sh
# Runs the tests on a one-node cluster that is started for them, and stopped after them, however they end. Needs root.
#
#   ONE_NODE   folder with setup.sh, up.sh and down.sh; after them $K/in-node runs a command where the cluster is reached
#   K          where it is unpacked, and runs
#   IMAGE_TAR  archives of the images that the tests name
#   PYTHON     an interpreter with pytest
#
#   e2e/one_node.sh -k upgrade       arguments go to pytest
set -eu
: "${ONE_NODE:?folder of the one-node cluster}" "${K:?folder that it is unpacked to}" "${IMAGE_TAR:?archives of the images}"
export K
export DIPTYCH_E2E_METRICS="$K/run/metrics.json" DIPTYCH_E2E_IMAGE="${DIPTYCH_E2E_IMAGE:-diptych:0.1.0-sim}"
export DIPTYCH_E2E_NEXT_IMAGE="$DIPTYCH_E2E_IMAGE-next" # the same by another name
here=$(cd "$(dirname "$0")" && pwd)

"$ONE_NODE/setup.sh" >/dev/null
trap '"$ONE_NODE/down.sh"' EXIT
trap 'exit 143' INT TERM
"$ONE_NODE/up.sh" >/dev/null
ctr() { "$K/in-node-all" ctr -n k8s.io images "$@" >/dev/null; }
for tar in $IMAGE_TAR; do ctr import "$tar"; done
ctr tag "docker.io/library/$DIPTYCH_E2E_IMAGE" "docker.io/library/$DIPTYCH_E2E_NEXT_IMAGE"
"$K/in-node" "${PYTHON:-python3}" -m pytest "$here" "$@"
