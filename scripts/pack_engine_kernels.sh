#!/usr/bin/env bash
# Pack the engine's Triton kernels for a GPU box that has torch and triton but no package index: the engine wheel's Python
# files without its dependencies, and the small packages that importing its kernel module needs.
#   scripts/pack_engine_kernels.sh OUT.tar.xz [ENGINE_VERSION=0.5.23] [PYTHON_VERSION=3.12]
# On the box: mkdir -p SITE && tar xf OUT.tar.xz -C SITE, then PYTHONPATH=python:SITE. About 17 MB and a minute.
set -euo pipefail
out=$(realpath -m "$1"); engine=${2:-0.5.23}; python=${3:-3.12}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$work/wheels" "$work/site"
abi=cp${python/./}
flags=(--quiet --no-deps --only-binary=:all: --implementation cp --abi "$abi" --abi abi3 --abi none)
for tag in manylinux_2_{39,34,31,28,27,26,24,17,12,5}_x86_64 manylinux2014_x86_64 any; do flags+=(--platform "$tag"); done
# Newest first that fits: these are whatever the engine's release asks for, and it pins few of them.
for package in orjson pybase64 starlette msgspec pyzmq ipython ipython-pygments-lexers prompt_toolkit decorator stack_data \
  executing asttokens pure_eval matplotlib-inline jedi parso pexpect ptyprocess wcwidth traitlets setproctitle \
  partial-json-parser loguru prometheus_client; do
  python3 -m pip download "${flags[@]}" --python-version "$python" -d "$work/wheels" "$package"
done
# pydantic names the core that it goes with; both together, so that pip chooses a pair.
python3 -m pip download --quiet --only-binary=:all: --implementation cp --abi "$abi" --abi none --python-version "$python" \
  --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any -d "$work/wheels" pydantic
python3 -m pip download "${flags[@]}" --python-version "$python" --platform manylinux_2_34_x86_64 -d "$work" "sglang==$engine"
for wheel in "$work"/wheels/*.whl; do python3 -m zipfile -e "$wheel" "$work/site"; done
python3 - "$work"/sglang-*.whl "$work/site" <<'EOF'
import sys, zipfile
wheel, site = zipfile.ZipFile(sys.argv[1]), sys.argv[2]
for name in wheel.namelist():
    # csrc and other non-Python files below kernels/ are looked for at import; images and models of other parts are not.
    wanted = name.startswith("sglang/kernels/") or (name.startswith("sglang/") and name.endswith(".py"))
    skipped = name.startswith(("sglang/multimodal_gen/", "sglang/test/")) and not name.startswith("sglang/test/ci/")
    if (wanted and not skipped) or name == "sglang/test/__init__.py" or name.endswith(".dist-info/METADATA"):
        wheel.extract(name, site)
EOF
tar cf - -C "$work/site" . | xz -T0 -1 >"$out"
ls -la "$out"
