#!/usr/bin/env bash
# Pack one engine to be served from another's environment, for a GPU box without a package index: its wheel, and those of the
# packages that it pins otherwise than the engine that is installed there.
#   scripts/pack_engine_overlay.sh OUT.tar.xz ENGINE_VERSION INSTALLED_VERSION [PYTHON_VERSION=3.12]
# On the box: mkdir -p FOLDER && tar xf OUT.tar.xz -C FOLDER, then PYTHONPATH=FOLDER:... About 46 MB and three minutes.
# Left out: PyTorch and whatever else is not in PACKAGES, and of the kernels those for Blackwell and of FlashAttention 3, so serve
# with --attention-backend triton. Both engines must ask for the same PyTorch; if they do not, nothing is packed.
set -euo pipefail
usage="usage: pack_engine_overlay.sh OUT.tar.xz ENGINE_VERSION INSTALLED_VERSION [PYTHON_VERSION]"
out=$(realpath -m "${1:?$usage}"); engine=${2:?$usage}; installed=${3:?$usage}; python=${4:-3.12}
packages=${PACKAGES:-sglang-kernel sgl-deep-ep sgl-deep-gemm flashinfer-python humming-kernels}
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
mkdir -p "$work/wheels" "$work/installed" "$work/site"
flags=(--quiet --no-deps --only-binary=:all: --python-version "$python" --implementation cp --abi "cp${python/./}" --abi abi3 --abi none)
for tag in manylinux_2_{39,36,35,34,31,28,27,24,17}_x86_64 manylinux2014_x86_64 any; do flags+=(--platform "$tag"); done
python3 -m pip download "${flags[@]}" -d "$work/wheels" "sglang==$engine"
python3 -m pip download "${flags[@]}" -d "$work/installed" "sglang==$installed"
pins=$(python3 - "$work"/wheels/sglang-*.whl "$work"/installed/sglang-*.whl $packages <<'EOF_PINS'
import re, sys, zipfile
from email.parser import Parser


def pins(path):
    wheel = zipfile.ZipFile(path)
    name = next(name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    found = {}
    for line in Parser().parsestr(wheel.read(name).decode()).get_all("Requires-Dist", []):
        pinned = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*==\s*([\w.+-]+)", line)
        if pinned and "extra ==" not in line:
            found.setdefault(pinned[1].lower().replace("_", "-"), pinned[2])
    return found


engine, installed = pins(sys.argv[1]), pins(sys.argv[2])
if engine.get("torch") != installed.get("torch"):
    sys.exit(f"pack_engine_overlay: one engine asks for torch {engine.get('torch')}, the other for {installed.get('torch')}")
print(*(f"{name}=={engine[name]}" for name in sys.argv[3:] if name in engine and engine[name] != installed.get(name)))
EOF_PINS
)
echo "sglang==$engine $pins" >&2
for pin in $pins; do python3 -m pip download "${flags[@]}" -d "$work/wheels" "$pin"; done
for wheel in "$work"/wheels/*.whl; do
  skipped=()
  case $wheel in */sglang_kernel-*) skipped=(-x 'sgl_kernel/flash_ops*' 'sgl_kernel/sm100/*') ;; esac
  unzip -q -o "$wheel" -d "$work/site" "${skipped[@]}"
done
for folder in "$work"/site/*.data/{purelib,platlib}; do [ ! -d "$folder" ] || cp -r "$folder/." "$work/site"; done
rm -rf "$work"/site/*.data
find "$work/site" -name '*.a' -delete
tar cf - -C "$work/site" . | xz -T0 -6 >"$out"
ls -la "$out"
