#!/usr/bin/env bash
# From a PACS export to a private classifier, its scores and its documents, patient by patient.
# MEDNIST=FOLDER/train.parquet takes real images in place of digits.
set -euo pipefail
cd "$(dirname "$0")"
PATIENTS=${NUM:-400} PYTHON=${PYTHON:-python}
run() { echo "+ dpvision $*"; $PYTHON -m dpvision "$@"; }
$PYTHON write_export.py pacs/archive 0 "$PATIENTS" ${MEDNIST:+"$MEDNIST"}
$PYTHON write_export.py pacs/new "$PATIENTS" 10 ${MEDNIST:+"$MEDNIST"}
CLASSES=$(wc -l < pacs/classes.txt)

run data import pacs/archive stores/all --window 0 4095 --label-from BodyPartExamined --classes pacs/classes.txt
run data split stores/all stores/train stores/test --fraction 0.75 --json | tee split.txt
held() { $PYTHON -c "import json; print(*list(json.loads(open('split.txt').read().split('\n', 1)[1])['parts'].values())[$1].values())"; }
read -r IMAGES PEOPLE < <(held 0)
run plan --images "$IMAGES" --people "$PEOPLE" --labels "$CLASSES" --epsilon 1
declared=(--dataset-size "$IMAGES" --privacy.num-units "$PEOPLE" --privacy.sampling-unit person --privacy.max-records-per-unit 6)
run adapt --data stores/train --num-classes "$CLASSES" "${declared[@]}" --epsilon 1 --name finder
read -r IMAGES PEOPLE < <(held 1)
run evaluate runs/finder --test stores/test --release 2 --privacy.dataset-size "$IMAGES" --privacy.num-units "$PEOPLE"
run evaluate runs/finder --test stores/test --per-class --groups pacs/archive.csv --by sex,age,scanner --show-confidential
run report runs/finder --store stores/train --tuning none --declared declared.json
run verify runs/finder/statement.json --run runs/finder --store stores/train
run export runs/finder entry --to opendp --declared declared.json
run predict runs/finder pacs/new --csv confidential/new.csv
