"""From settings to files: files, folders, globs and saved datasets; the same rules for a hub's
listing."""

import json
from pathlib import Path

import pytest

from workflow.lib.data.reading.sources import find_files, matching, resolve_splits
from workflow.lib.settings.data import DataConfig
from workflow.lib.system.errors import UserError

LISTING = [
    "README.md",
    "a.jsonl",
    "data/b-1.parquet",
    "data/b-2.parquet",
    "data/deep/c.parquet",
    "data/.hidden.parquet",
    "other/d[1].jsonl",
]


@pytest.fixture
def tree(tmp_path):
    for name in LISTING:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def sources(root, train, **settings):
    config = DataConfig.model_validate({"train": train, "heldout": None, **settings})
    return resolve_splits(config, root=root)["train"]


def files(root, train, **settings):
    return [file.file for source in sources(root, train, **settings) for file in source.files]


PATTERNS = [
    ("a.jsonl", ["a.jsonl"]),
    ("data", ["data/b-1.parquet", "data/b-2.parquet", "data/deep/c.parquet"]),
    ("data/*.parquet", ["data/b-1.parquet", "data/b-2.parquet"]),
    ("data/b-[!1].parquet", ["data/b-2.parquet"]),
    ("data/b-?.parquet", ["data/b-1.parquet", "data/b-2.parquet"]),
    ("**/*.parquet", ["data/b-1.parquet", "data/b-2.parquet", "data/deep/c.parquet"]),
    ("data/**", ["data/b-1.parquet", "data/b-2.parquet", "data/deep/c.parquet"]),
    ("other/d[1].jsonl", ["other/d[1].jsonl"]),
    ("*.jsonl", ["a.jsonl"]),
]


@pytest.mark.parametrize(("pattern", "names"), PATTERNS)
def test_path_folder_or_glob_gives_its_files_in_order(tree, pattern, names):
    assert files(tree, pattern) == names
    assert [file.path for file in sources(tree, pattern)[0].files] == [
        tree / name for name in names
    ]


@pytest.mark.parametrize(("pattern", "names"), PATTERNS)
def test_listing_of_a_hub_is_matched_as_a_folder_is(pattern, names):
    visible = {name for name in matching(LISTING, pattern) if "/." not in name}
    assert sorted(visible) == names


@pytest.mark.parametrize("path", ["data", "data/*.parquet"])
def test_link_to_a_file_elsewhere_is_read(tree, path):
    (tree / "elsewhere").mkdir()
    (tree / "elsewhere" / "x.bin").touch()
    (tree / "data" / "b-3.parquet").symlink_to("../elsewhere/x.bin")
    assert "data/b-3.parquet" in files(tree, path)


@pytest.mark.parametrize(
    ("path", "name", "target", "said"),
    [
        ("data", "b-3.parquet", "gone", r"the link b-3\.parquet"),
        ("data/*.parquet", "b-3.parquet", "gone", r"the link data/b-3\.parquet"),
        ("data/**", "b-3.parquet", "gone", r"the link (data/)?b-3\.parquet"),
        ("data", "more", "../other", r"more in it leads to a folder, which is not searched\. Name"),
        ("data/**", "more", "../other", r"more in it leads to a folder, which is not searched"),
    ],
)
def test_link_to_nothing_or_a_folder_stops_instead_of_being_passed_over(
    tree, path, name, target, said
):
    (tree / "data" / name).symlink_to(target)
    with pytest.raises(UserError, match=said):
        files(tree, path)


NOWHERE = r"data\.train = .* Give a path that exists"


@pytest.mark.parametrize(
    ("train", "said"),
    [
        *((name, NOWHERE) for name in ["none.jsonl", "*.csv", "a**b.jsonl", "data/*/none"]),
        ("answer.parqet", r"no such file or folder\. Did you mean 'answers.parquet'\? "),
        (".", r"several types \(json, jsonl, parquet\). Name the files by a glob"),
        ("empty", r"holds no file that ends in \.jsonl"),
        ("README.md", r"README.md': the extension is none of .* data\.file_type"),
        (
            [{"path": "a.jsonl", "name": "x"}, {"path": "data", "name": "x"}],
            r"data\.train = 'x': 2 sources have this name",
        ),
        ("splits/", r"the splits train, test. Name the folder of one: splits/<split>"),
    ],
)
def test_path_that_names_no_files_of_one_type_stops_with_what_to_do(tree, train, said):
    (tree / "answers.parquet").touch()
    for name in ("empty", "splits"):
        (tree / name).mkdir()
    (tree / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(UserError, match=said):
        files(tree, train)


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("teknium/OpenHermes-2.5", "A dataset of the hub is named by data.source, and its files"),
        ("https://host/rows.jsonl", "Addresses are not read: load the file"),
        ("~/rows.jsonl", "~ and $NAME are not expanded"),
        ("data/rows.jsonl", "Give a path that exists"),
    ],
)
def test_path_that_is_no_path_is_answered_with_what_it_seems_to_be(path, advice):
    with pytest.raises(UserError) as refusal:
        find_files(path, setting="data.train", root=Path())
    assert f": there is no such file or folder. {advice}" in str(refusal.value)


def test_file_of_unknown_extension_is_of_the_type_that_is_set(tree):
    (source,) = sources(tree, "README.md", file_type="text")
    assert [file.file_type for file in source.files] == ["text"]


def test_types_are_told_below_a_compression(tree):
    (tree / "x.CSV.gz").touch()
    assert [file.file_type for file in sources(tree, "x.CSV.gz")[0].files] == ["csv"]


def test_several_sources_keep_order_name_and_weight(tree):
    resolved = sources(tree, ["data", {"path": "a.jsonl", "name": "mine", "weight": 0.5}])
    assert [(s.name, s.weight, len(s.files)) for s in resolved] == [
        ("data", 1.0, 3),
        ("mine", 0.5, 1),
    ]


@pytest.mark.parametrize(
    ("train", "heldout"),
    [
        (["a.jsonl", "./a.jsonl"], None),
        ("**/*.jsonl", "a.jsonl"),
        ("data", "data/deep/../b-1.parquet"),
    ],
)
def test_file_that_is_named_twice_stops(tree, train, heldout):
    with pytest.raises(UserError, match="Name every file once"):
        files(tree, train, heldout=heldout)


def save_state(folder, **state):
    (folder / "state.json").write_text(json.dumps(state))


@pytest.mark.parametrize("text", ["[" * 100_000, '{"_data_files": 1}', '{"_data_files": [1]}'])
def test_broken_state_of_a_saved_dataset_is_one_message(tree, text):
    (tree / "saved").mkdir()
    (tree / "saved" / "state.json").write_text(text)
    with pytest.raises(UserError, match=r"data\.train = .* Save the dataset again"):
        files(tree, "saved")


def test_saved_dataset_gives_the_files_of_its_state_and_not_its_caches(tree):
    folder = tree / "saved"
    folder.mkdir()
    for name in ("data-1.arrow", "data-2.arrow", "cache-77.arrow", "dataset_info.json"):
        (folder / name).touch()
    save_state(folder, _data_files=[{"filename": "data-2.arrow"}, {"filename": "data-1.arrow"}])
    assert files(tree, "saved") == ["saved/data-2.arrow", "saved/data-1.arrow"]


@pytest.mark.parametrize(
    ("state", "finding"),
    [
        ({"_data_files": [{"filename": "gone.arrow"}]}, "names gone.arrow, which is not there"),
        ({"_data_files": [{"filename": "../a.jsonl"}]}, "names ../a.jsonl, which is not there"),
        ({"_data_files": []}, "names no file"),
        ({"_indices_data_files": [{"filename": "x"}]}, "a selection of rows"),
    ],
)
def test_saved_dataset_that_is_not_whole_stops(tree, state, finding):
    save_state(tree / "other", **state)
    with pytest.raises(UserError, match=finding):
        files(tree, "other")


def test_record_of_a_download_is_no_data(tree):
    (tree / "hub" / "d").mkdir(parents=True)
    (tree / "hub" / "source.json").touch()
    (tree / "hub" / "d" / "a.csv").touch()
    assert files(tree / "hub", ".") == ["d/a.csv"]
