"""The table file: what is written is read back, and nothing else is."""

from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ppdbench.core.errors import TableError, UsageError
from ppdbench.table.schema import (
    AXES,
    Cell,
    Table,
    canonical,
    digest_of,
    load_table,
    parse_table,
    save_table,
    to_document,
)
from ppdbench.table.score import STATISTICS, Choice, Guard, Rule, Side

figure = st.one_of(st.none(), st.floats(1e-4, 10))
stats = st.fixed_dictionaries(dict.fromkeys(STATISTICS, figure))
sides = st.builds(Side, st.integers(0, 500), st.floats(0, 1), stats, stats, stats)
centres = st.tuples(
    st.integers(1, 9000), st.integers(1, 4000), st.integers(1, 2000), st.floats(0.1, 50)
)
replicates = st.lists(st.integers(-9000, 9000), min_size=5, max_size=5)
cells = st.builds(
    lambda centre, remote, local, drawn: Cell(
        topology="2P_2D",
        workload="w",
        backend="sim",
        centre=dict(zip(AXES, centre, strict=True)),
        remote=remote,
        local=local,
        replicates=drawn,
    ),
    centres,
    sides,
    sides,
    st.none() | st.fixed_dictionaries({"d_ttft": replicates, "d_tpot": replicates}),
)
rules = st.builds(
    Rule,
    w_ttft=st.floats(0.1, 10),
    w_tpot=st.floats(0, 10),
    undecided=st.sampled_from([Choice.REMOTE, Choice.LOCAL]),
    guard=st.none() | st.just(Guard("p99", limit_ratio=1.2)),
    max_distance=st.none() | st.floats(0.5, 4),
)
tables = st.builds(
    lambda rule, found: Table(rule, {"bases": ["2P_2D"]}, tuple(found)),
    rules,
    st.lists(cells, min_size=1, max_size=6, unique_by=lambda c: c.key),
)


def content_of(table):
    return canonical(to_document(table))


@pytest.fixture
def content():
    def stats(mean):
        return {**dict.fromkeys(STATISTICS), "mean": mean}

    remote = Side(40, 1.0, stats(0.2), stats(0.01), stats(0.01))
    local = Side(40, 1.0, stats(0.1), stats(0.011), stats(0.01))
    made = Cell(
        topology="2P_2D",
        workload="w",
        backend="sim",
        centre=dict(zip(AXES, (2048, 128, 128, 8.0), strict=True)),
        remote=remote,
        local=local,
    )
    return content_of(Table(Rule(), {"bases": ["2P_2D"]}, (made,)))


@settings(max_examples=40)
@given(tables)
def test_write_read_write_is_byte_equal(table):
    """A table read and written again is the same file."""
    content = content_of(table)

    assert content_of(parse_table(content)) == content


@settings(max_examples=40)
@given(tables, st.data())
def test_any_changed_byte_is_caught(table, data):
    """A table with one byte changed, wherever and to whatever, does not load."""
    content = bytearray(content_of(table))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] = data.draw(st.integers(0, 255).filter(lambda b: b != content[place]))

    with pytest.raises(TableError):
        parse_table(bytes(content))


def resealed(content, change):
    """A hand-edited table whose editor also fixed the digest."""
    document = json.loads(content)
    change(document)
    del document["digest"]
    return canonical({**document, "digest": digest_of(document)})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda d: d["cells"][0].update(decision="remote"), "field 'decision'"),
        (lambda d: d["cells"][0].update(s=0.9), "field 's'"),
        (lambda d: d["cells"][0]["local"]["ttft_s"].update(mean=0.3), "field 'd_ttft'"),
        (lambda d: d["weights"].update(w_tpot=99.0), "field 'decision'"),
        (lambda d: d["axes"][0].update(range=[1, 2]), "axes"),
        (lambda d: d["cells"].append(d["cells"][0]), "duplicate cell 2P_2D context_tokens=2048"),
        (lambda d: d.update(cells=[]), "at least one cell"),
        (lambda d: d.update(cells=7), "wrong kind"),
        (lambda d: d["cells"][0].pop("remote"), "'remote'"),
        (lambda d: d["cells"][0].update(context_tokens=-5), "positive"),
        (lambda d: d["cells"][0].update(context_tokens="2048"), "positive"),
        (lambda d: d["weights"].update(w_tpot=-1.0), "weights"),
        (lambda d: d["weights"].update(w_tpot=10**400), "w_tpot"),
        (lambda d: d.update(provenance=None), "provenance"),
        (lambda d: d["provenance"].update(backend=7), "backend"),
        (lambda d: d["provenance"].update(runs=7), "runs is '7'"),
        (lambda d: d["provenance"].update(runs=[{"backend": "sim"}]), "expected runs"),
        (lambda d: d["provenance"].update(bases=7), "bases is '7'"),
        (lambda d: d["provenance"].update(pairs=["2P_2D"]), "pairs"),
        (lambda d: d["cells"][0].update(running_requests=3), "field 'running_requests'"),
        (lambda d: d["cells"][0].update(topology="x"), "topology 'x'"),
        (lambda d: d["cells"][0].update(new_tokens=10**400), "new_tokens"),
        (lambda d: d["cells"][0].update(replicates=True), "replicates"),
        (lambda d: d["cells"][0].update(replicates={"d_ttft": [1], "d_tpot": []}), "replicates"),
        (lambda d: d["cells"][0]["remote"].update(n=None), "n is 'None'"),
        (lambda d: d["cells"][0]["remote"].update(success=1.5), "expected share"),
        (lambda d: d["cells"][0]["local"]["ttft_s"].update(mean="0.1"), "ttft_s"),
        (lambda d: d["cells"][0]["local"]["ttft_s"].update(mean=1e308), "ttft_s"),
        (lambda d: d["cells"][0]["local"]["tpot_s"].update(p50=[]), "tpot_s"),
        (lambda d: d["rule"].update(min_n=1.5), "min_n"),
        (
            lambda d: d["rule"].update(guard={"stat": "x", "limit_s": 1, "limit_ratio": None}),
            "Guard",
        ),
        (lambda d: d.update(extra=1), "extra"),
        (lambda d: d.update(schema_version=2), "schema version 2.*upgrade ppdbench"),
        (lambda d: d.update(schema_version="x"), "schema version 'x'"),
    ],
)
def test_a_resealed_edit_is_refused_by_name(content, change, told):
    """Figures must follow from the raw ones and the rule, whatever the digest says."""
    with pytest.raises(TableError, match=told):
        parse_table(resealed(content, change))


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda c: c[: len(c) // 2], "truncated"),
        (lambda c: b"", "truncated"),
        (lambda c: b"[1]", "no decision table"),
        (lambda c: b"{}", "no decision table"),
        (lambda c: re.sub(rb'"s": [0-9.]+', b'"s": NaN', c), "NaN"),
        (lambda c: re.sub(rb'"s": [0-9.]+', b'"s": 1e999', c), "no table may hold"),
        (lambda c: c.replace(b'"local"', b'"remote"'), "digest"),
        (lambda c: c.replace(b": ", b":"), "canonical"),
        (lambda c: b"[" * 100_000, "damaged"),
        (lambda c: b"\xef\xbb\xbf" + c, "canonical"),
        (lambda c: b"\xff\xfe" + c, "damaged"),
    ],
)
def test_a_damaged_file_is_refused_in_a_sentence(content, damage, told, tmp_path):
    """Truncated, edited, NaN, foreign: a TableError that names the file, nothing else."""
    path = tmp_path / "t.json"
    path.write_bytes(damage(content))

    with pytest.raises(TableError, match=told) as caught:
        load_table(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    """The message says how a table is made."""
    with pytest.raises(TableError, match="ppd build-table"):
        load_table(tmp_path / "none.json")


def test_saving_leaves_one_whole_file(content, tmp_path):
    """No temporary file stays behind."""
    save_table(parse_table(content), tmp_path / "new" / "t.json")

    assert [p.name for p in (tmp_path / "new").iterdir()] == ["t.json"]
    assert (tmp_path / "new" / "t.json").read_bytes() == content


def test_saving_touches_no_other_file(content, tmp_path):
    """Whatever lies beside the table under a name that a temporary file might have stays."""
    kept = tmp_path / "kept"
    kept.write_text("kept")
    (tmp_path / ".t.json.tmp").symlink_to(kept)
    (tmp_path / "t.json.part").write_text("kept")

    save_table(parse_table(content), tmp_path / "t.json")

    assert kept.read_text() == (tmp_path / "t.json.part").read_text() == "kept"
    assert (tmp_path / ".t.json.tmp").is_symlink()


def test_two_writers_of_one_table_both_succeed(content, tmp_path):
    """One of the two files stands at the end, whole."""
    table, path = parse_table(content), tmp_path / "t.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: save_table(table, path), range(64)))

    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["t.json"]


def test_a_table_does_not_replace_what_is_no_file(content, tmp_path):
    """A pipe or a device under that name stays what it is."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    with pytest.raises(UsageError, match="not a file's name"):
        save_table(parse_table(content), pipe)
    assert pipe.is_fifo()
