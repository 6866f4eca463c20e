#!/usr/bin/env bash
# The command line from images to a checked guarantee, on procedural scenes.
set -euo pipefail
cd "$(dirname "$0")"
NUM=${NUM:-2000}
run() { echo "+ dpvision $*"; ${DPVISION:-dpvision} "$@"; }

run data scenes stores/mine --num "$NUM" --size-px 32 --label colour --workers 1
run data scenes stores/test --num 500 --size-px 32 --first "$NUM" --label colour --public --workers 1
run ledger stores/mine --set-cap 3 --cap-delta 1e-3
run adapt --data stores/mine --num-classes 10 --dataset-size "$NUM" --epsilon 2 --dry-run
run adapt --data stores/mine --test stores/test --num-classes 10 --dataset-size "$NUM" --epsilon 2 --name first
run report runs/first --public-store stores/test --tuning none
run verify runs/first/statement.json --run runs/first --store stores/mine
run ledger stores/mine
