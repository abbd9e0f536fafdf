#!/bin/sh
# Builds images and says how large they are and what is in them: images/build.sh [sim] [cpu] [cuda]
#
#   BUILDER=buildah images/build.sh sim           docker if there is one, else buildah
#   REPOSITORY=registry.example/diptych           what the tag VERSION-TARGET is put behind
#   BUILD_OPTIONS="--build-arg MARCH=x86-64-v4"   more options for the builder
set -eu
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
created=$(git log -1 --format=%cI 2>/dev/null || echo 1970-01-01T00:00:00Z)
builder=${BUILDER:-$(command -v docker >/dev/null && echo docker || echo buildah)}

build() {
  format=$([ "$builder" = docker ] || echo "--format docker") # OCI's has no health check
  # shellcheck disable=SC2086
  "$builder" build $format --file images/Dockerfile --target "$target" --tag "$tag" --build-arg VERSION="$version" \
    --build-arg REVISION="$revision" --build-arg CREATED="$created" ${BUILD_OPTIONS:-} .
}

size() {
  if [ "$builder" = docker ]; then docker image inspect --format '{{.Size}} bytes' "$tag"; else buildah images --format '{{.Size}}' "$tag"; fi
}

python_inside() {
  if [ "$builder" = docker ]; then docker run --rm --entrypoint python "$tag" "$@"; return; fi
  container=$(buildah from --pull=never "$tag")
  buildah run "$container" -- python "$@"
  buildah rm "$container" >/dev/null
}

mkdir -p dist
for target in ${*:-sim cpu}; do
  tag=${REPOSITORY:-diptych}:$version-$target
  bill=dist/diptych-$version-$target.cdx.json
  build
  python_inside -c 'print(open("/opt/diptych/sbom.cdx.json").read())' > "$bill"
  echo "$tag: $(size), $(grep -c '"purl"' "$bill") packages, listed in $bill"
done
