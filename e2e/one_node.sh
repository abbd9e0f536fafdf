#!/bin/sh
# Runs the tests on a one-node cluster that is started for them, and stopped after them. Needs root.
#
#   ONE_NODE   folder with setup.sh, up.sh and down.sh; after them $K/in-node runs a command where the cluster is reached
#   K          where it is unpacked, and runs
#   IMAGE_TAR  archive of the image DIPTYCH_E2E_IMAGE
#   PYTHON     an interpreter with pytest
#
#   e2e/one_node.sh -k upgrade       arguments go to pytest
set -eu
: "${ONE_NODE:?folder of the one-node cluster}" "${K:?folder that it is unpacked to}" "${IMAGE_TAR:?archive of the image}"
export K
here=$(cd "$(dirname "$0")" && pwd)
"$ONE_NODE/setup.sh"
trap '"$ONE_NODE/down.sh"' EXIT
"$ONE_NODE/up.sh"
"$K/in-node-all" ctr -n k8s.io images import "$IMAGE_TAR"
"$K/in-node" "${PYTHON:-python3}" -m pytest "$here" "$@"
