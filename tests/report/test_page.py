"""The page, as a browser without a network opens it."""

import html
import re
import shutil
import subprocess

import pytest
import torch
from torch import nn

from fsdp_compile import rewrite
from fsdp_compile.costs import HARDWARE, predict
from fsdp_compile.report import Schedule, page
from tests.models import Block
from tests.passes.tiny import rows, three_layers
from tests.report.test_schedule import prediction_of

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(BROWSER is None, reason="needs chromium, a package of Debian")
MEGABYTES = 1 << 20


ALONE = (  # without a display, a network, or what another browser of this user is doing
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


def opened(path):
    """What the browser makes of a page, and what it says on its console."""
    profile = f"--user-data-dir={path.parent / 'profile'}"
    command = [BROWSER, *ALONE, profile, "--enable-logging=stderr", "--dump-dom", f"file://{path}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    said = [line for line in found.stderr.splitlines() if "CONSOLE" in line]
    return found.stdout, said


def test_a_page_asks_nothing_of_a_network():
    text = page([Schedule.of(prediction_of(three_layers(), rows()))])
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|src=|@import|url\((?!#)", text)


def test_text_in_a_graph_does_not_end_the_script():
    schedule = Schedule.of(prediction_of(three_layers(), rows()))
    text = page([Schedule(**{**vars(schedule), "title": "</script><b>"})])
    assert "</script><b>" not in text and text.count("</script>") == 2


@needs_browser
def test_the_browser_draws_lanes_memory_and_texts(tmp_path):
    schedules = [Schedule.of(prediction_of(three_layers(), rows())) for _ in range(2)]
    (tmp_path / "page.html").write_text(page(schedules))
    document, said = opened(tmp_path / "page.html")
    assert said == []
    assert document.count('class="block gather"') == len([b for b in schedules[0].blocks if b.kind == "gather"])
    for kind in ("compute", "reduce", "exposed", "free"):
        assert f'class="block {kind}"' in document
    assert document.count('class="memory"') >= 3
    hover = html.unescape(document)
    assert "gather mid.gathered\nunit mid, forward" in hover and "tiny.py" in hover
    assert 'id="backward-3"' in document and "fsdp.all_gather(low)" in document and "bound" in document


@needs_browser
@pytest.mark.parametrize("layers", [2, 32])
def test_a_transformer_of_many_layers_is_a_page_of_less_than_two_megabytes(tmp_path, layers):
    blocks = nn.Sequential(*(Block(16, 2) for _ in range(layers)))
    prediction = predict(rewrite(blocks, torch.randn(2, 8, 16), world_size=8), HARDWARE["h100"])
    text = page([Schedule.of(prediction)])
    assert len(text.encode()) < 2 * MEGABYTES
    (tmp_path / "page.html").write_text(text)
    document, said = opened(tmp_path / "page.html")
    assert said == []
    assert document.count('class="block gather"') >= 2 * layers - 1
