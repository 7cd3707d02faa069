"""``ppd build-table`` and ``ppd table`` as a user meets them: documents, exit codes, sentences."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from ppdbench.cli.app import app
from ppdbench.runs.manifest import EngineIdentity, Manifest
from ppdbench.runs.store import RunWriter
from ppdbench.table.schema import Cell, Table, save_table
from ppdbench.table.score import Rule, Side, Slo

STATISTICS = ("mean", "p50", "p90", "p95", "p99")


def point(policy, rate, ttft_s, tpot_s):
    def group():
        lengths = {"context_tokens": 2048, "new_tokens": 128, "output_tokens": 64}
        return {
            "n": 40,
            "ttft_s": dict.fromkeys(STATISTICS, ttft_s),
            "tpot_s": dict.fromkeys(STATISTICS, tpot_s),
            **{name: {"mean": value} for name, value in lengths.items()},
        }

    return {
        "topology": "2P_2D", "policy": policy, "workload": "large_tiny", "rate_per_s": rate,
        "repeat": 0,
        "success": 1.0, "validity": [], "turn2plus": group(), "all": group(), "turn1": group(),
    }  # fmt: skip


def write_run(folder, backend="sim", gain=0.5, **identity):
    """A finished run of four rates; at the highest, local costs TPOT."""
    engine = EngineIdentity(**{"backend": backend, "engine": backend, "model": "m", **identity})
    points = []
    for rate in (1.0, 2.0, 4.0, 8.0):
        points.append(point("remote", rate, 0.2, 0.01))
        points.append(point("local", rate, 0.2 * (1 - gain), 0.012 if rate > 4 else 0.01))
    with RunWriter(folder, Manifest(engine, grid="smoke", commit=None)) as run:
        run.write_points(points)
    return folder


def ppd(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def said(*arguments):
    """The command's one JSON document."""
    result = ppd(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("commands") / "run")


@pytest.fixture(scope="module")
def table(run):
    path = run.parent / "table.json"
    assert ppd("build-table", run, "--base", "2P_2D", "-o", path).exit_code == 0
    return path


def test_build_says_what_it_built(run, tmp_path):
    """The counts of the contract, and the digest that the file carries."""
    document = said("build-table", run, "--base", "2P_2D", "-o", tmp_path / "t.json")

    assert {"cells", "local", "remote", "undecided", "one_sided", "failed", "digest"} <= set(
        document
    )
    assert (document["cells"], document["local"]) == (4, 4)
    assert json.loads((tmp_path / "t.json").read_text())["digest"] == document["digest"]


def test_equal_runs_give_equal_bytes(tmp_path):
    """Neither the folder's name nor when it was built is in the table."""
    for name in ("a", "b"):
        folder = write_run(tmp_path / name)
        ppd("build-table", folder, "--base", "2P_2D", "-o", tmp_path / f"{name}.json")

    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()


@pytest.mark.parametrize(
    "wrong",
    [
        ("--base", "4R"),
        ("--base", "2X"),
        ("--base", "2P_2D", "--stat", "p42"),
        ("--base", "2P_2D", "--w-tpot", "-1"),
        ("--base", "2P_2D", "--guard", "ttft=1"),
        ("--base", "2P_2D", "--slo", "ttft=1"),
        ("--base", "2P_2D", "--slo", "ttft=1,tpot=1"),
        ("--base", "2P_2D", "--undecided", "maybe"),
    ],
)
def test_a_wrong_option_is_one_sentence(run, tmp_path, wrong):
    """Exit 2, one line on stderr, no traceback, no table."""
    result = ppd("build-table", run, *wrong, "-o", tmp_path / "t.json")

    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "t.json").exists()


def test_a_base_nobody_measured_ends_with_1(run, tmp_path):
    """The work is done and nothing usable came out."""
    result = ppd("build-table", run, "--base", "1P_3D", "-o", tmp_path / "t.json")

    assert result.exit_code == 1
    assert "sweep the base under remote and local" in result.stderr


def test_runs_that_differ_are_refused_by_field(run, tmp_path):
    """The message names the field."""
    other = write_run(tmp_path / "other", gpu="b200")
    result = ppd("build-table", run, other, "--base", "2P_2D", "-o", tmp_path / "t.json")

    assert result.exit_code == 2
    assert "gpu" in result.stderr


def test_a_live_run_wins_over_a_simulated_one(run, tmp_path):
    """Cell by cell; the table is still called simulated while one such cell is in it."""
    live = write_run(tmp_path / "live", backend="vllm", gain=-0.5, engine_version="0.21")
    document = said("build-table", run, live, "--base", "2P_2D", "-o", tmp_path / "t.json")

    assert (document["cells"], document["remote"]) == (4, 4)
    assert said("table", "check", tmp_path / "t.json")["simulated"] is False


@pytest.mark.parametrize("command", ["show", "check"])
def test_a_simulated_table_says_so(table, command):
    """Wherever it is shown."""
    assert "simulat" in ppd("table", command, table).stdout.lower()
    assert said("table", "check", table)["simulated"] is True


def test_show_draws_a_row_per_shape_and_names_the_first_flip(table):
    """The heat map's row, S in its cells, and the ratio of weights at which a cell turns."""
    shown = ppd("table", "show", table).stdout

    assert "2048 + 128 → 64" in shown
    assert "L +0.50" in shown
    assert "r*    2.50" in shown


def test_show_json_says_where_the_table_flips_and_at_which_weight(table):
    """What the screen shows, per cell: r*, null where no TPOT is paid; and who turns first."""
    flips = said("table", "show", table)["flips"]

    assert [(c["rate_per_s"], c["r_star"]) for c in flips["cells"]] == [
        (1.0, None), (2.0, None), (4.0, None), (8.0, pytest.approx(2.5)),
    ]  # fmt: skip
    assert flips["weight_ratio"] == 1.0
    assert flips["next"] == [3]


def test_reweight_and_diff_agree_with_a_build(run, table, tmp_path):
    """Other weights need no run: the same bytes as building with them; diff names the rule."""
    built, weighed = tmp_path / "built.json", tmp_path / "weighed.json"
    said("build-table", run, "--base", "2P_2D", "--w-tpot", 6, "-o", built)
    counts = said("table", "reweight", table, "--w-tpot", 6, "-o", weighed)
    changed = said("table", "diff", table, weighed)

    assert built.read_bytes() == weighed.read_bytes()
    assert (counts["local"], counts["remote"]) == (3, 1)
    assert [(c["before"], c["after"], c["why"]) for c in changed["changed"]] == [
        ("local", "remote", "rule")
    ]
    assert changed["rule"] == {"w_tpot": ["1.0", "6.0"]}


def test_limits_are_not_reweighed(tmp_path):
    """A table that decides by --slo has no weights to change; saying so beats doing nothing."""
    stats = dict.fromkeys(STATISTICS, 0.1)
    side = Side(40, 1.0, stats, stats, stats, meets_slo=0.5)
    centre = {"context_tokens": 64, "new_tokens": 8, "output_tokens": 8, "rate_per_s": 1.0}
    cell = Cell(
        topology="2P_2D", workload="w", backend="vllm", centre=centre, remote=side, local=side
    )
    save_table(Table(Rule(slo=Slo(0.2, 0.03)), {}, (cell,)), tmp_path / "t.json")
    result = ppd("table", "reweight", tmp_path / "t.json", "--w-tpot", 6, "-o", tmp_path / "u.json")

    assert result.exit_code == 2
    assert "limits" in result.stderr


@pytest.mark.parametrize("router", ["vllm-router", "dynamo", "llm-d"])
def test_an_export_has_its_price(table, tmp_path, router):
    """A file for the router, and the regret of each simpler policy."""
    out = tmp_path / "export"
    document = said("table", "export", table, "--to", router, "-o", out)

    assert out.read_text() == document["export"]
    assert {"always_local", "always_remote"} <= {r["policy"] for r in document["regret"]}
    assert document["simulated"] is True


def test_a_plan_is_a_grid_that_a_sweep_takes(table, tmp_path):
    """Ppd sweep reads what ppd table plan wrote, and finds the places that were chosen."""
    grid = tmp_path / "next.toml"
    planned = said("table", "plan", table, "--budget", "4m", "-o", grid)
    swept = said("sweep", "--grid", grid, "--dry-run")

    assert [place["rate_per_s"] for place in planned["places"]] == [8.0]
    assert swept["points"] == 2 * 3
    assert planned["expected_s"] == 120


ONE_TURN = """
rates_per_s = [2.0]
duration_s = 5.0
[[arm]]
topologies = ["2P_2D"]
policies = ["remote"]
[[workload]]
name = "once"
turns = [[64, 8]]
"""


@pytest.mark.parametrize(
    ("traffic", "told"), [("", "grid ''"), ("{once}", "--traffic once has no later turn")]
)
def test_traffic_that_weighs_nothing_is_refused(table, tmp_path, traffic, told):
    """Never taken as if --traffic had been left out."""
    once = tmp_path / "once.toml"
    once.write_text(ONE_TURN)
    result = ppd("table", "plan", table, "--budget", "4m", "--traffic", traffic.format(once=once))

    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


def test_a_plan_says_what_its_traffic_met(table):
    """In the document and on the terminal, with what lies outside the measured range."""
    given = ("table", "plan", table, "--budget", "4m", "--traffic", "smoke")
    met = said(*given)["traffic"]
    shown = ppd(*given).stderr

    assert met["grid"] == "smoke"
    assert met["later_turns"] == met["outside"] > 0
    assert f"{met['later_turns']} later turns look up {met['cells']} cells" in shown
    assert said(*given[:5])["traffic"] is None


def test_a_plan_for_another_grid_is_refused(table):
    """A grid that has none of the table's workloads cannot go on from it."""
    result = ppd("table", "plan", table, "--budget", "30m", "--grid", "smoke-live")

    assert result.exit_code == 2
    assert "give the grid it was measured with" in result.stderr


DAMAGE = {
    "truncated": lambda text: text[: len(text) // 2],
    "hand-edited": lambda text: text.replace('"decision": "local"', '"decision": "remote"', 1),
    "newer": lambda text: text.replace('"schema_version": 1', '"schema_version": 9'),
    "not a number": lambda text: text.replace('"s": 0.5', '"s": NaN', 1),
    "duplicate cell": lambda text: text.replace('"rate_per_s": 2.0', '"rate_per_s": 1.0'),
    "code": lambda _: "__import__('os').system('false')",
}


COMMANDS = {
    "show": [],
    "check": [],
    "diff": ["{table}"],
    "reweight": ["--w-tpot", "6", "-o", "{out}"],
    "export": ["--to", "dynamo", "-o", "{out}"],
    "plan": ["--budget", "30m", "-o", "{out}"],
}


@pytest.mark.parametrize(
    ("command", "kind"),
    [*((command, "hand-edited") for command in COMMANDS), *(("check", kind) for kind in DAMAGE)],
)
def test_a_damaged_table_is_refused(table, tmp_path, command, kind):
    """By every command: exit 2, one sentence that names the file, no traceback, no output."""
    bad, out = tmp_path / "bad.json", tmp_path / "out.json"
    bad.write_text(DAMAGE[kind](table.read_text()))
    more = [text.format(table=table, out=out) for text in COMMANDS[command]]
    result = ppd("table", command, bad, *more)

    assert result.exit_code == 2
    assert str(bad) in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert "Traceback" not in result.stderr
    assert not (tmp_path / "out.json").exists()


def test_a_result_that_is_no_result_is_refused_by_the_import(tmp_path):
    """The file is named; a folder without results says what was expected."""
    folder = tmp_path / "results" / "2P_2D"
    folder.mkdir(parents=True)
    empty = ppd("import", "vllm-ppd", tmp_path / "results", "-o", tmp_path / "run")
    (folder / "2P_2D_small_tiny_8.json").write_text('{"config": "2P_2D"')
    broken = ppd("import", "vllm-ppd", tmp_path / "results", "-o", tmp_path / "run")

    assert (empty.exit_code, broken.exit_code) == (2, 2)
    assert "CONFIG_WORKLOAD_QPS.json" in empty.stderr
    assert "2P_2D_small_tiny_8.json" in broken.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--guard", ""), "--guard ''"),
        (("--slo", ""), "--slo ''"),
        (("--slo", "ttft=0.2,tpot=0.03", "--w-tpot", "2"), "--slo decides instead of weights"),
        (("--max-distance", "inf"), "max_distance=inf"),
        (("--base", "2P_2D"), "given twice"),
    ],
)
def test_options_that_say_nothing_or_two_things_are_refused(run, tmp_path, options, told):
    """Never ignored: the table would not be the one that was asked for."""
    result = ppd("build-table", run, "--base", "2P_2D", "-o", tmp_path / "t.json", *options)

    assert result.exit_code == 2
    assert told in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_name_for_a_table(run, tmp_path):
    """One sentence, whether the folder has a name or is the current one."""
    for output in (tmp_path, "."):
        result = ppd("build-table", run, "--base", "2P_2D", "-o", output)
        assert result.exit_code == 2
        assert "choose another -o" in result.stderr


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("vllm-router", "--rate", "nan"), "--rate nan"),
        (("vllm-router", "--tpot-limit", "-1"), "--tpot-limit -1"),
        (("vllm-router", "--tpot-limit", "0"), "--tpot-limit 0"),
        (("vllm-router", "--profile", ""), "--profile"),
        (("llm-d", "--rate", "2"), "llm-d has none"),
    ],
)
def test_an_export_option_that_means_nothing_is_refused(table, options, told):
    """A limit below 0 would refuse every local turn over there, in silence."""
    result = ppd("table", "export", table, "--to", *options)

    assert (result.exit_code, result.stdout) == (2, "")
    assert told in result.stderr


def test_a_plan_for_a_table_of_two_bases_asks_which(tmp_path):
    """The first one in the alphabet is not what somebody meant."""
    rule, bases = Rule(), ("1P_3D", "2P_2D")
    sides = {
        name: Side(40, 1.0, *(dict.fromkeys(STATISTICS, v) for v in (ttft, 0.01, 0.01)))
        for name, ttft in (("remote", 0.2), ("local", 0.19))
    }
    centre = {"context_tokens": 2048, "new_tokens": 16, "output_tokens": 32, "rate_per_s": 1.0}
    cells = tuple(
        Cell(topology=base, workload="large_tiny", backend="sim", centre=centre, **sides)
        for base in bases
    )
    path = tmp_path / "two.json"
    save_table(Table(rule, {"backend": "sim", "grids": ["paper-synthetic"]}, cells), path)

    unsaid = ppd("table", "plan", path, "--budget", "30m")
    assert unsaid.exit_code == 2
    assert "the table holds 1P_3D, 2P_2D" in unsaid.stderr
    assert (
        'topologies = ["2P_2D"]'
        in said("table", "plan", path, "--budget", "30m", "--base", "2P_2D")["grid"]
    )


def test_an_export_says_whether_its_prices_are_in_sample(run, table, tmp_path):
    """Figures of another run score the choices; those of the same run are no other figures."""
    other = tmp_path / "fresh.json"
    again = write_run(tmp_path / "again", gain=0.4)
    assert ppd("build-table", again, "--base", "2P_2D", "-o", other).exit_code == 0

    assert said("table", "export", table, "--to", "dynamo")["in_sample"] is True
    held_out = said("table", "export", table, "--to", "dynamo", "--fresh", other)
    prices = {row["policy"]: row["mean_s_lost"] for row in held_out["regret"]}
    assert held_out["in_sample"] is False
    assert prices["always_remote"] == pytest.approx(0.4 - 0.2 / 4)
    assert ppd("table", "export", table, "--to", "dynamo", "--fresh", table).exit_code == 2
