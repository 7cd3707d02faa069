"""Grid files: which points, which conversations, and what is refused."""

from __future__ import annotations

import pytest

from ppdbench.core.errors import WorkloadError
from ppdbench.experiments.grid import load_grid, shipped_grids

GRID = """
rates_per_s = [1, 4]
duration_s = 20
repeats = 2
[[arm]]
topologies = ["2P_2D"]
policies = ["remote", "local"]
[[workload]]
name = "two"
turns = [[1024, 64], [32, 16]]
"""


def write(tmp_path, text):
    path = tmp_path / "g.toml"
    path.write_text(text)
    return str(path)


def test_the_paper_grid_has_its_3060_points_and_about_486000_requests():
    """17 shapes × 18 workloads × 10 rates; 2 turns × 10 s × Σ rates (79.5) × 306 ≈ 486,540."""
    grid = load_grid("paper-synthetic")
    points = grid.points()
    first_shape = [point for point in points if point.topology == "4R"]

    requests = 17 * 2 * sum(len(grid.schedule(point, 1)) for point in first_shape)

    assert len(points) == len(set(points)) == 3060
    assert abs(requests / 486_540 - 1) < 0.02


def test_the_demo_grid_has_its_135_points():
    """2P_2D remote and local and 4R, 5 workloads, 3 rates, 3 repeats, records kept."""
    grid = load_grid("demo")

    arms = {(point.topology, point.policy) for point in grid.points()}

    assert len(grid.points()) == 135
    assert arms == {("2P_2D", "remote"), ("2P_2D", "local"), ("4R", "roles")}
    assert grid.keep_records


@pytest.mark.parametrize("name", shipped_grids())
def test_every_shipped_grid_reads_and_states_its_source(name):
    """A shipped grid parses, and its first line is a comment on where it comes from."""
    from ppdbench.experiments.grid import find_grid

    assert load_grid(name).points()
    assert find_grid(name).read_text().startswith("# ")


def test_compared_routes_get_the_same_conversations_and_arrivals(tmp_path):
    """A schedule depends on workload, rate, repeat and seed alone; each of them changes it."""
    grid = load_grid(write(tmp_path, GRID))
    schedules = {
        (p.policy, p.rate_per_s, p.repeat): grid.schedule(p, root_seed=1) for p in grid.points()
    }

    other_seed = grid.schedule(grid.points()[0], root_seed=2)

    assert schedules["remote", 4.0, 0] == schedules["local", 4.0, 0]
    assert schedules["remote", 4.0, 0] != schedules["remote", 4.0, 1]
    assert schedules["remote", 1.0, 0] != other_seed


def test_conversations_never_repeat_within_a_point(tmp_path):
    """Every conversation of a schedule has its own id."""
    grid = load_grid(write(tmp_path, GRID))

    ids = [a.conversation.id for p in grid.points()[:4] for a in grid.schedule(p, 1)]

    assert len(ids) == len(set(ids))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("repeats = 2", "repeat = 2"), "did you mean `repeats`"),
        (("rates_per_s = [1, 4]", "rates_per_s = [0]"), "rates_per_s"),
        (("rates_per_s = [1, 4]", "rates_per_s = [4, 4]"), "different numbers"),
        (("rates_per_s = [1, 4]", "users = [4]"), "cannot be honoured by poisson"),
        (("2P_2D", "2P"), "P is present exactly when"),
        (("duration_s = 20", ""), "duration_s"),
        (("turns = [[1024, 64], [32, 16]]", "turns = [[1024]]"), "expected [[new, output]"),
        (("turns = [[1024, 64], [32, 16]]", ""), "`turns`"),
        (('"two"', '"two"\nthink = {kind = "recorded"}'), "synthetic"),
        (('"two"', '"two"\nthink = {kind = "fixed", sigma = 1}'), "`seconds` is missing"),
        (("[[arm]]", '[arrivals]\nprocess = "gamma"\n[[arm]]'), "burstiness"),
        (("[[arm]]", '[arrivals]\nprocess = "poisson"\ncv = 2\n[[arm]]'), "`cv` is not known"),
        (("[[arm]]", '[engine]\nreplies = "mine"\n[[arm]]'), "model or recorded"),
        (("[[arm]]", "[[arm]"), "no TOML file"),
    ],
)
def test_what_a_grid_cannot_mean_is_refused_with_its_place(tmp_path, change, said):
    """An unknown key, a bad value, or an option that the mode cannot honour is an error."""
    path = write(tmp_path, GRID.replace(*change))

    with pytest.raises(WorkloadError) as caught:
        load_grid(path)

    assert said in str(caught.value)
    assert path in str(caught.value)


def test_an_unknown_grid_names_the_shipped_ones():
    """The error of an unknown name lists what there is."""
    with pytest.raises(WorkloadError, match="paper-synthetic"):
        load_grid("no-such-grid")


def test_a_grid_digest_covers_what_is_said_not_how(tmp_path):
    """Comments and layout do not change a digest; a value does."""
    digest = load_grid(write(tmp_path, GRID)).digest

    assert load_grid(write(tmp_path, "# note\n" + GRID)).digest == digest
    assert load_grid(write(tmp_path, GRID.replace("20", "21"))).digest != digest


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("rates_per_s = [1, 4]", "rates_per_s = [1e-9]"), "expected 0.01 to 1e+07 in a point"),
        (("duration_s = 20", "duration_s = 1e300"), "expected 0.01 to 1e+07 in a point"),
        (("[[arm]]", '[arrivals]\nprocess = "gamma"\ncv = 1e200\n[[arm]]'), "variation of 1e+200"),
        (
            ("turns = [[1024, 64], [32, 16]]", 'source = "x"\nmin_turns = 3\nmax_turns = 2'),
            "at least 3 and at most 2",
        ),
    ],
)
def test_what_no_point_can_hold_is_refused_before_the_run(tmp_path, change, said):
    """A draw that would never end or never fit, and limits that no conversation passes."""
    with pytest.raises(WorkloadError) as caught:
        load_grid(write(tmp_path, GRID.replace(*change)))

    assert said in str(caught.value)


TRACE = GRID.replace("rates_per_s = [1, 4]\n", "").replace(
    "[[arm]]", '[arrivals]\nprocess = "trace"\nfile = "times.txt"\n[[arm]]'
)


def test_a_trace_that_begins_after_the_duration_is_refused(tmp_path):
    """Otherwise the point would have no conversation."""
    (tmp_path / "times.txt").write_text("30\n31\n")

    with pytest.raises(WorkloadError, match="the trace begins at 30 s"):
        load_grid(write(tmp_path, TRACE))


DRAWN = GRID.replace(
    "turns = [[1024, 64], [32, 16]]",
    '[workload.draw]\nturns = 2\nnew_tokens = { file = "times.txt" }\noutput_tokens = 8',
)


@pytest.mark.parametrize("text", [TRACE, DRAWN], ids=["trace", "lengths"])
def test_digests_cover_the_files_that_a_grid_names(tmp_path, text):
    """A changed trace or file of lengths is another grid and another workload."""
    digests = set()
    for times in ("5\n6\n", "5\n7\n"):
        (tmp_path / "times.txt").write_text(times)
        grid = load_grid(write(tmp_path, text))
        digests |= {grid.digest, grid.workload_digest("two")}

    assert len(digests) == 4


def test_a_folder_may_have_an_at_sign_in_its_name(tmp_path):
    """What follows the last @ is a variant only where the whole is no file."""
    folder = tmp_path / "me@home"
    folder.mkdir()
    variants = GRID.replace("[[arm]]", '[variant.slow]\nlink = "eth_100g"\n[[arm]]')

    assert load_grid(write(folder, GRID)).name == "g"
    assert load_grid(write(folder, variants) + "@slow").settings == {"link": "eth_100g"}
