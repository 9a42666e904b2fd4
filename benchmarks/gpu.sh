#!/usr/bin/env bash
# Everything that needs an NVIDIA GPU, in at most 8 minutes: correctness in bf16 first, then times.
# Writes gpu_DATE.json into $OUT, or into benchmarks/results.
set -uo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
OUT=${OUT:-benchmarks/results}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH}
exec timeout 480 "$PYTHON" benchmarks/gpu_attention.py --seconds "${SECONDS_IN_ALL:-440}" \
    --out "$OUT/gpu_$(date +%F).json"
