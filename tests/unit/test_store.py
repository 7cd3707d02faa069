"""A run folder is whole, locked, resumable, and refuses what does not belong in it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from ppdbench.core.decision import Route
from ppdbench.core.errors import RunError
from ppdbench.experiments.microbench.results import write_result
from ppdbench.runs.manifest import EngineIdentity, Manifest, refuse_to_pool
from ppdbench.runs.recording import read_records, records_as_parquet
from ppdbench.runs.records import Outcome, TurnRecord
from ppdbench.runs.store import (
    RunWriter,
    point_line,
    read_manifest,
    read_points,
    read_timing,
)

SRC = Path(__file__).parents[2] / "src"
ENGINE = EngineIdentity("sim", "simulator", "1", "m", "bfloat16", "h100", "nixl", 16, {"a": 1})
MANIFEST = Manifest(ENGINE, "demo", 1, "g1", {"w": "d1"})


def test_points_are_assembled_in_grid_order(tmp_path):
    """Whatever order they finished in; a point that is missing is left out."""
    with RunWriter(tmp_path / "run", MANIFEST) as writer:
        for slug in ("b", "a"):
            writer.put(slug, point_line({"name": slug, "at": 1}))
        written = writer.assemble(["a", "b", "c"])

    assert written == 2
    assert [point["name"] for point in read_points(tmp_path / "run")] == ["a", "b"]
    assert (tmp_path / "run/points.jsonl").read_bytes().startswith(b'{"at":1,"name":"a"}\n')


def test_an_existing_run_is_refused_without_resume(tmp_path):
    """The message names --resume; with it, the finished points are known."""
    with RunWriter(tmp_path, MANIFEST) as writer:
        writer.put("a", b"{}\n")

    with pytest.raises(RunError, match="--resume"), RunWriter(tmp_path, MANIFEST):
        pass
    with RunWriter(tmp_path, MANIFEST, resume=True) as writer:
        assert writer.finished() == {"a"}


def test_half_written_files_are_dropped_and_never_counted(tmp_path):
    """A kill may leave a temporary file and half a line of timing."""
    with RunWriter(tmp_path, MANIFEST) as writer:
        writer.put("a", b"{}\n")
        writer.log({"point": "a"})
    (tmp_path / "points/b.json.part").write_bytes(b'{"half')
    with (tmp_path / "timing.jsonl").open("ab") as file:
        file.write(b'{"poi')

    with RunWriter(tmp_path, MANIFEST, resume=True) as writer:
        assert writer.finished() == {"a"}
        writer.log({"point": "b"})

    assert not list(tmp_path.rglob("*.part"))
    assert [line["point"] for line in read_timing(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize("content", [b"", b'{"topology":"1P_1D"', b"{}"])
def test_a_point_cut_short_by_a_copy_is_no_finished_point(tmp_path, content):
    """It would be missing from points.jsonl without a word, or damage it for good."""
    with RunWriter(tmp_path, MANIFEST) as writer:
        writer.put("a", b"{}\n")
        writer.put("b", b"{}\n")
    (tmp_path / "points/b.json").write_bytes(content)

    with RunWriter(tmp_path, MANIFEST, resume=True) as writer:
        assert writer.finished() == {"a"}
        assert writer.assemble(["a", "b"]) == 1


def test_a_second_writer_is_refused_until_the_first_process_is_gone(tmp_path):
    """The lock is the kernel's: it goes with the process, SIGKILL included."""
    hold = (
        "import sys, time; from pathlib import Path; sys.path[:0] = [sys.argv[2]]\n"
        "from ppdbench.runs.store import _lock\n"
        "_lock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"
    )
    with RunWriter(tmp_path, MANIFEST):
        pass
    holder = subprocess.Popen(
        [sys.executable, "-c", hold, str(tmp_path), str(SRC)], stdout=subprocess.PIPE
    )
    with holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(RunError, match="another ppd"):
            RunWriter(tmp_path, MANIFEST, resume=True).__enter__()
        holder.kill()
    with RunWriter(tmp_path, MANIFEST, resume=True) as writer:
        assert writer.finished() == set()


def test_a_run_that_does_not_say_its_goodput_limits_can_be_resumed(tmp_path):
    """Runs of before it was written down are not lost."""
    with RunWriter(tmp_path, MANIFEST):
        pass

    now = replace(MANIFEST, goodput_limits={"ttft_s": 0.5, "tpot_s": 0.03})
    with RunWriter(tmp_path, now, resume=True) as writer:
        assert writer.finished() == set()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        (replace(MANIFEST, seed=2), "seed"),
        (replace(MANIFEST, grid_digest="g2"), "grid_digest"),
        (replace(MANIFEST, workload_digests={"w": "d2"}), "workload_digests.w"),
        (replace(MANIFEST, tool_version="9"), "tool_version"),
        (replace(MANIFEST, engine=replace(ENGINE, model="n")), "model"),
        (replace(MANIFEST, engine=replace(ENGINE, engine_version="2")), "engine_version"),
        (replace(MANIFEST, engine=replace(ENGINE, flags={"a": 2})), "flags.a"),
    ],
)
def test_resume_refuses_another_experiment_and_names_the_field(tmp_path, changed, field):
    """Grid, seed, model, engine version, flags: one folder, one experiment."""
    with RunWriter(tmp_path, MANIFEST):
        pass

    with pytest.raises(RunError, match=rf"resumed: {field} is"):
        RunWriter(tmp_path, changed, resume=True).__enter__()
    with RunWriter(tmp_path, replace(MANIFEST, commit="other"), resume=True):
        pass


@pytest.mark.parametrize(
    "field", ["model", "dtype", "gpu", "engine_version", "connector", "block_size"]
)
def test_pooling_refuses_what_differs_and_names_it(field):
    """Both runs, the field and both values stand in the message."""
    other = replace(MANIFEST, engine=replace(ENGINE, **{field: 99}))

    with pytest.raises(RunError, match=f"a and b do not mix: {field} is .* and 99"):
        refuse_to_pool({"a": MANIFEST, "b": other})


def test_pooling_refuses_another_tensor_parallelism():
    """A node of two GPUs is another machine; a stated width of 1 is the same as none."""
    wide, stated = (
        replace(MANIFEST, engine=replace(MANIFEST.engine, flags={"tensor_parallel": {"P": width}}))
        for width in (2, 1)
    )

    refuse_to_pool({"a": MANIFEST, "b": stated})
    with pytest.raises(RunError, match="tensor_parallel"):
        refuse_to_pool({"a": MANIFEST, "b": wide})


def test_pooling_looks_at_shared_workloads_only():
    """A run with another workload adds cells; the same name with other content does not mix."""
    more = replace(MANIFEST, workload_digests={"v": "d9"})
    wrong = replace(MANIFEST, workload_digests={"w": "d9"})

    refuse_to_pool({"a": MANIFEST, "b": more})
    with pytest.raises(RunError, match=r"workload_digests\.w"):
        refuse_to_pool({"a": MANIFEST, "b": wrong})


def test_a_live_run_stands_beside_a_simulated_one_only_when_asked():
    """The backend and its version are exempt then; the model never is."""
    live = replace(MANIFEST, engine=replace(ENGINE, backend="vllm", engine_version="0.24"))

    with pytest.raises(RunError, match="backend"):
        refuse_to_pool({"a": MANIFEST, "b": live})
    refuse_to_pool({"a": MANIFEST, "b": live}, across_backends=True)


def test_a_manifest_survives_its_file(tmp_path):
    """What is read back equals what was written, and another schema version is refused."""
    with RunWriter(tmp_path, MANIFEST):
        pass

    assert read_manifest(tmp_path).document() == MANIFEST.document()
    text = (tmp_path / "manifest.json").read_text()
    (tmp_path / "manifest.json").write_text(
        text.replace('"schema_version": 1', '"schema_version": 7')
    )
    with pytest.raises(RunError, match="schema version 7"):
        read_manifest(tmp_path)


@pytest.mark.parametrize("break_it", ["unlink", "garbage"])
def test_reading_what_is_no_run_says_so(tmp_path, break_it):
    """A missing or damaged file is one sentence with what to do."""
    with RunWriter(tmp_path, MANIFEST):
        pass
    path = tmp_path / "manifest.json"
    path.unlink() if break_it == "unlink" else path.write_bytes(b"\x00{")

    with pytest.raises(RunError, match=r"manifest\.json"):
        read_points(tmp_path)


def test_records_survive_parquet_and_warm_up_lies_apart(tmp_path):
    """Every field comes back, unknown as None; warm-up turns are in a folder of their own."""
    measured = TurnRecord(
        "c", 2, Route.LOCAL, "d0", 0.5, 0.6, None, 0.7, 0.9, token_at_s=[0.7, 0.9], output_tokens=2
    )
    broken = TurnRecord("d", 1, Route.REMOTE, "d0", 0.0, 0.0, outcome=Outcome.TIMEOUT)
    warm = replace(measured, warm_up=True)

    with RunWriter(tmp_path, MANIFEST) as writer:
        writer.put("s", b"{}\n", records_as_parquet([measured, broken, warm]))

    assert read_records(tmp_path, "s") == [measured, broken]
    assert read_records(tmp_path, "s", "warm_up") == [warm]
    assert read_records(tmp_path, "other") == []


def test_an_attempt_that_ended_before_its_first_point_is_no_run_to_continue(tmp_path):
    """A GPU without costs is found out after the manifest: the corrected command must go."""
    other = replace(MANIFEST, seed=99)
    with RunWriter(tmp_path, MANIFEST) as writer:
        writer.assemble([])

    with RunWriter(tmp_path, other) as writer:
        writer.put("p", b"{}\n")
        writer.assemble(["p"])

    assert read_manifest(tmp_path).seed == 99
    with pytest.raises(RunError, match="already holds"):
        RunWriter(tmp_path, MANIFEST).__enter__()


def test_records_of_an_attempt_that_stored_no_point_are_not_the_next_runs(tmp_path):
    """A kill between a point's records and the point leaves them; they are another experiment's."""
    record = TurnRecord("c", 1, Route.LOCAL, "d0", 0.0, 0.0)
    with RunWriter(tmp_path, MANIFEST) as writer:
        writer.put("p", b"{}\n", records_as_parquet([record, replace(record, warm_up=True)]))
    (tmp_path / "points/p.json").unlink()

    with RunWriter(tmp_path, replace(MANIFEST, seed=99)) as writer:
        writer.put("p", b"{}\n")

    assert read_records(tmp_path, "p") == []
    assert read_records(tmp_path, "p", "warm_up") == []


def test_a_run_that_lost_its_points_folder_is_not_emptied_by_resuming(tmp_path):
    """An archive of the light files alone: its points.jsonl is all there is, and stays."""
    with RunWriter(tmp_path, MANIFEST) as writer:
        writer.put("p", b"{}\n")
        writer.assemble(["p"])
    (tmp_path / "points/p.json").unlink()

    with pytest.raises(RunError, match="points/"), RunWriter(tmp_path, MANIFEST, resume=True):
        pass
    assert (tmp_path / "points.jsonl").read_bytes() == b"{}\n"


def test_a_micro_benchmarks_folder_is_no_run_to_begin_anew(tmp_path):
    """It has a manifest and no point, and is a result all the same."""
    document = {"protocol": "engine", "kind": "microbench"}
    record = TurnRecord("c", 1, Route.LOCAL, "d0", 0.0, 0.0)
    write_result(tmp_path, MANIFEST, document, [record])
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    other = RunWriter(tmp_path, replace(MANIFEST, seed=99))
    with pytest.raises(RunError, match="already holds"):
        other.__enter__()
    assert before == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
