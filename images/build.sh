#!/bin/sh
# Builds images and says how large they are, what is in them and of what they were made: images/build.sh [sim] [cpu] [cuda]
#
#   BUILDER=buildah images/build.sh sim           docker if there is one whose daemon answers, else buildah
#   REPOSITORY=registry.example/diptych           what the tag VERSION-TARGET is put behind
#   BASE_IMAGE=name@sha256:...                    what the images stand on; BUILD_IMAGE: likewise, with pip
#   BUILD_OPTIONS="--build-arg MARCH=x86-64-v4"   more options for the builder
#   SIGN_KEY=key                                  signs the provenance: a private key of ssh-keygen
#   RELEASE=1                                     refuses what can't be told again: docs/operations/images.md
set -eu
cd "$(dirname "$0")/.."

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
created=$(git log -1 --format=%cI 2>/dev/null || echo 1970-01-01T00:00:00Z)
base=${BASE_IMAGE:-$(sed -n 's/^ARG BASE_IMAGE=//p' images/Dockerfile)}

refuse() { echo "No release: $1." >&2; exit 1; }

check_release() {
  for name in "$base" "${BUILD_IMAGE:-$base}"; do
    printf '%s\n' "$name" | grep -qE '@sha256:[0-9a-f]{64}$' || refuse "$name may mean another image tomorrow; give BASE_IMAGE (and \
BUILD_IMAGE) as name@sha256:..., which \`docker buildx imagetools inspect $name\` prints"
  done
  [ -z "$(git status --porcelain)" ] || refuse "there are changes that no commit has; commit or remove them"
  [ -n "${SIGN_KEY:-}" ] || refuse "SIGN_KEY names no key to sign the provenance with"
}

build() {
  format=$([ "$builder" = docker ] || echo "--format docker") # OCI's has no health check
  # shellcheck disable=SC2086
  "$builder" build $format --file images/Dockerfile --target "$target" --tag "$tag" --build-arg VERSION="$version" \
    --build-arg REVISION="$revision" --build-arg CREATED="$created" --build-arg BASE_IMAGE="$base" \
    --build-arg BUILD_IMAGE="${BUILD_IMAGE:-$base}" ${BUILD_OPTIONS:-} .
}

size() {
  if [ "$builder" = docker ]; then docker image inspect --format '{{.Size}} bytes' "$tag"; else buildah images --format '{{.Size}}' "$tag"; fi
}

# What names the image by its content: its ID.
image_digest() {
  if [ "$builder" = docker ]; then docker image inspect --format '{{.Id}}' "$tag"; return; fi
  echo "sha256:$(buildah inspect --type image --format '{{.FromImageID}}' "$tag")"
}

# The digest that the base came by; unknown where neither its name nor the builder tells.
base_digest() {
  case $base in *@sha256:*) echo "${base##*@}"; return ;; esac
  if [ "$builder" = docker ]; then docker image inspect --format '{{range .RepoDigests}}{{println .}}{{end}}' "$base"; else
    buildah inspect --type image --format '{{.FromImageDigest}}' "$base"; fi 2>/dev/null | sed 's/.*@//' | head -n 1
}

python_inside() {
  if [ "$builder" = docker ]; then docker run --rm --entrypoint python "$tag" "$@"; return; fi
  container=$(buildah from --pull=never "$tag")
  buildah run "$container" -- python "$@"
  buildah rm "$container" >/dev/null
}

[ -z "${RELEASE:-}" ] || check_release
builder=${BUILDER:-$(docker version >/dev/null 2>&1 && echo docker || echo buildah)}
mkdir -p dist
for target in ${*:-sim cpu}; do
  tag=${REPOSITORY:-diptych}:$version-$target
  bill=dist/diptych-$version-$target.cdx.json
  provenance=dist/diptych-$version-$target.intoto.json
  build
  python_inside -c 'print(open("/opt/diptych/sbom.cdx.json").read())' > "$bill"
  python3 images/provenance.py --image "$tag" "$(image_digest)" --base "$base" "$(base_digest)" --revision "$revision" \
    --target "$target" --builder "$builder" --options "${BUILD_OPTIONS:-}" --bill "$bill" > "$provenance"
  rm -f "$provenance.sig"
  [ -z "${SIGN_KEY:-}" ] || ssh-keygen -q -Y sign -n diptych-provenance -f "$SIGN_KEY" "$provenance"
  echo "$tag: $(size), $(grep -c '"purl"' "$bill") packages, listed in $bill; made of what $provenance says"
done
