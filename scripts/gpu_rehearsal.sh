#!/usr/bin/env bash
# The GPU acceptance on this CPU, in a fresh environment that has what the GPU machine has and nothing else, plus the wheelhouse.
#
#     scripts/gpu_rehearsal.sh [PYTHON=python3]        the acceptance itself takes under ten minutes
set -euo pipefail
cd "$(dirname "$0")/.."
python=${1:-python3}
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
folder=carry/rehearsal
rm -rf "$folder"
mkdir -p "$folder"
scripts/gpu_wheelhouse.sh "$folder/wheels" "$version" >"$folder/wheelhouse.txt" || { cat "$folder/wheelhouse.txt"; exit 1; }
sed '/^$/,$d' "$folder/wheelhouse.txt"

uv=.venv/bin/uv env=$folder/env
$uv venv --quiet --python "$python" "$env"
.venv/bin/python scripts/gpu_wheels.py machine --python "$version" >"$folder/machine.txt"
$uv pip install --quiet --python "$env/bin/python" -r "$folder/machine.txt" packaging
# What came along and is not on the machine: taken away again. CUDA's libraries have other names from version to version.
$uv pip list --quiet --python "$env/bin/python" --format freeze | sed 's/==.*//' | tr 'A-Z_' 'a-z-' | sort >"$folder/installed.txt"
sed 's/#.*//; s/==.*//' scripts/gpu_machine.txt | tr 'A-Z_' 'a-z-' | sort | comm -13 - "$folder/installed.txt" | grep -v '^nvidia-' >"$folder/hidden.txt" || true
[ ! -s "$folder/hidden.txt" ] || $uv pip uninstall --quiet --python "$env/bin/python" -r "$folder/hidden.txt"
echo "hidden from the environment: $(paste -sd' ' "$folder/hidden.txt")"

site=$folder/site
$uv pip install --quiet --python "$env/bin/python" --no-index --no-deps --target "$site" "$folder"/wheels/*.whl
start=$(date +%s)
status=0
env -u VIRTUAL_ENV PYTHONPATH="$PWD/$site" OMP_NUM_THREADS=1 "$env/bin/python" benchmarks/gpu_acceptance.py --device cpu --minutes 10 --out "$folder/acceptance" || status=$?
echo "Python $version, $("$env/bin/python" -c 'import torch; print("torch", torch.__version__)'): $(($(date +%s) - start)) s, exit status $status"
exit $status
