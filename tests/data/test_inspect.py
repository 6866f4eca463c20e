import json

import numpy as np

from dpvision.data.inspect import contact_sheet, inspect_store

from .image_files import spoil


def test_inspection_counts_what_is_there(store):
    found = inspect_store(store)
    assert json.loads(json.dumps(found)) == found
    assert found["num_records"] == found["sampled"] == 40
    assert found["labels"] == {f"class {k}": 10 for k in range(4)}
    assert found["picture_bytes"] == sum(len(store.read(i)) for i in range(40))
    assert found["without_unit"] == 5
    unit = np.array(store.index["unit"])
    counts = np.unique(unit[unit >= 0], return_counts=True)[1]
    assert found["units"] == len(counts)
    assert found["records_per_unit"]["p100"] == counts.max()
    assert (found["height_px"]["p0"], found["height_px"]["p100"]) == (20, 33)
    assert found["captions_per_record"] == {"2": 40}
    spoil(store, 0)
    assert inspect_store(store)["undecodable"] == 1


def test_the_contact_sheet_shows_the_images_in_tiles(store):
    sheet = contact_sheet(store, 40, tile_px=32, columns=8)
    assert sheet.size == (8 * 32, 5 * (32 + 14))
    assert sheet.mode == "RGB"
    tiles = [
        sheet.crop((x * 32, y * 46, x * 32 + 32, y * 46 + 32)).tobytes()
        for y in range(5)
        for x in range(8)
    ]
    assert len(set(tiles)) == 40
    assert contact_sheet(store, 3, tile_px=32).size == (96, 46)
