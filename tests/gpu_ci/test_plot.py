"""What the drawing of results.csv takes from it."""

from pathlib import Path

from gpu_ci.bench import plot

CSV = """date,bench,case,metric,value
d,qsa,T65536-random-Hq24,ours: forward + backward,200
d,qsa,T8192-random-Hq24,ours: forward + backward,20
d,qsa,T8192-correlated-Hq24,ours: forward + backward,7
d,qsa,T8192-Hq24,dense cuDNN: forward + backward,6
d,qsa,T8192-Hq24,dense cuDNN: forward,2
d,qsa,T8192-random-Hq24,"forward + backward, ours / dense cuDNN",3
d,sparse_mla,T8192-H16,ours: forward + backward,1
"""


def test_series_are_by_who_and_selection(tmp_path: Path) -> None:
    file = tmp_path / "results.csv"
    file.write_text(CSV)
    assert plot.series(file) == {
        "dense cuDNN": [(8192, 6.0)],
        "ours, correlated selection": [(8192, 7.0)],
        "ours, random selection": [(8192, 20.0), (65536, 200.0)],
    }


def test_the_same_figures_give_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot.draw(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    assert "dense cuDNN" in (tmp_path / "a.svg").read_text()
