#!/usr/bin/env bash
# Everything that is measured or checked on a GPU without a server, in stages that can be run one by one and go on where they
# stopped. Results land in the folder given; copy them to benchmark/results/<gpu>/ (tuned files to python/sglang_w4afp8/configs).
#   scripts/run_gpu_kernels.sh OUT STAGE...      stages: unit tune bench gemm layer two shipped sanitize fuzz demo
# Environment: KERNEL_LIBRARY and KERNEL_VERSION, where sgl_kernel is not installed (its common_ops library and version);
#              TAG, appended to the names of the results (a second toolchain, say);
#              TUNE_SECONDS, after which tuning stops with what it has.
# The engine's kernels must be importable (see scripts/pack_engine_kernels.sh); absent, its columns stay empty.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd); shift
export PYTHONPATH=python${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
tag=${TAG:+_$TAG}
started=$SECONDS
status=0
command_line() { python3 -m sglang_w4afp8.cli "$@"; }
library=()
if [ -n "${KERNEL_LIBRARY:-}" ]; then
  library=(--kernel-library "$KERNEL_LIBRARY" --kernel-version "${KERNEL_VERSION:?must name the version of KERNEL_LIBRARY}")
  export SGLANG_W4AFP8_TEST_KERNEL_LIBRARY=$KERNEL_LIBRARY
fi

stage_unit() {
  local workers=()
  python3 -c 'import xdist' 2>/dev/null && workers=(-n 12 --dist worksteal)
  python3 test/run_suite.py --hw cuda --suite base-b-kernel-unit -- \
    -q -rf --durations=10 "${workers[@]}" -p no:cacheprovider --junitxml="$out/unit$tag.xml" | tail -40
  python3 scripts/device_summary.py "$out/unit$tag.xml" --out "$out/kernel_unit$tag.json"
}
stage_tune() {
  local code=0
  # What was measured before the time ran out is a table too, and the next run goes on with it.
  timeout "${TUNE_SECONDS:-1h}" python3 -m sglang_w4afp8.cli tune streaming --out "$out" || code=$?
  cp "$out"/streaming_*.json python/sglang_w4afp8/configs/ || code=1
  return $code
}
stage_bench() {
  command_line bench requant --out "$out/requant$tag.json" &&
    command_line bench bf16 --out "$out/bf16$tag.json" &&
    command_line bench silu --out "$out/silu$tag.json" &&
    command_line bench layer --out "$out/streaming$tag.json"
}
stage_gemm() {
  python3 benchmark/gemm_tiles.py "${library[@]}" --output "$out/gemm_tiles$tag.json" ${GEMM_ARGUMENTS:-}
}
stage_layer() {
  python3 benchmark/moe_layer.py "${library[@]}" --out "$out/moe_layer$tag.json"
}
stage_two() {
  local command=(python3 benchmark/two_kernels.py "${library[@]}" --out "$out/two_kernels$tag.json")
  "${command[@]}" --table "$out" ${TWO_ARGUMENTS:-} && "${command[@]}" --accuracy
}
stage_shipped() { # what servers launch of the two kernels, by the Triton that runs
  python3 benchmark/two_kernels.py "${library[@]}" --shipped --out "$out/two_kernels_shipped$tag.json" ${TWO_ARGUMENTS:-}
}
stage_sanitize() {
  local tool log failed=0
  for tool in memcheck racecheck; do
    log=$(mktemp)
    compute-sanitizer --tool "$tool" --error-exitcode 3 --log-file "$log" python3 -m pytest -q -p no:cacheprovider \
      test/registered/kernels/ops/moe/test_fp8_per_token_to_per_tensor_quant.py \
      test/registered/kernels/ops/moe/test_silu_and_mul_masked_quant.py \
      test/registered/kernels/ops/moe/test_w4a8_two_kernels.py \
      test/registered/kernels/ops/moe/test_problem_sizes.py \
      -k "one_part or hot or tails or empty or problem_sizes or past or exact or float64 or one_expert_after_another" \
      --junitxml="$log.xml" | tail -3 || failed=1
    tail -2 "$log"
    python3 scripts/device_summary.py "$log.xml" --log "$log" --out "$out/sanitize_$tool$tag.json" || failed=1
  done
  return $failed
}
stage_fuzz() {
  python3 benchmark/fuzz_device.py --output "$out/fuzz$tag.json"
}
stage_demo() {
  command_line demo | tee "$out/demo$tag.txt"
}

for stage in "$@"; do
  declare -F "stage_$stage" >/dev/null || { echo "unknown stage $stage" >&2; exit 2; }
  "stage_$stage"
  code=$?
  [ $code = 0 ] || status=1
  echo "== $stage: exit status $code, $((SECONDS - started)) s since the start"
done
exit $status
