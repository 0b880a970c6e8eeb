"""The page of ``GET /v1/hypic/explain`` in a headless browser: Debian's chromium, driven by selenium."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from benchmarks.lib.serving import Server

from .test_explain import explained, segments
from .test_segments import ask, document
from .test_structure import CUT, chat, part

CHROMIUM, DRIVER = Path("/usr/bin/chromium"), shutil.which("chromedriver")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)

pytestmark = pytest.mark.skipif(
    not CHROMIUM.exists() or DRIVER is None,
    reason="no /usr/bin/chromium, or no chromedriver on PATH: apt-get install chromium chromium-driver",
)


@pytest.fixture(scope="module")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, webdriver.ChromeService(executable_path=DRIVER))
    yield driver
    driver.quit()


@pytest.fixture
def browser(_browser: webdriver.Chrome, byte_server: Server) -> Iterator[webdriver.Chrome]:
    """With the page open; nothing on it may have failed."""
    _browser.get(f"{byte_server.url}/v1/hypic/explain")
    _browser.get_log("browser")
    yield _browser
    wrong = [entry for entry in _browser.get_log("browser") if "favicon" not in entry["message"]]
    assert [entry for entry in wrong if "/v1/hypic/explain - Failed" not in entry["message"]] == []


def submit(browser: webdriver.Chrome, request: str, salt: str = "") -> None:
    """Put a request into the form, press the button, and wait for what comes."""
    for field, value in (("request", request), ("salt", salt)):
        # Typing takes a second for a thousand characters.
        browser.execute_script(f"document.getElementById('{field}').value = arguments[0]", value)
    browser.find_element(By.ID, "explain").click()
    WebDriverWait(browser, 60).until(
        lambda b: (
            b.find_element(By.ID, "explain").is_enabled()
            and (b.find_element(By.ID, "answer").is_displayed() or b.find_element(By.ID, "error").text)
        )
    )


def rows(browser: webdriver.Chrome) -> list[list[str]]:
    found = browser.find_elements(By.CSS_SELECTOR, "#parts tr")
    return [[cell.text for cell in row.find_elements(By.TAG_NAME, "td")] for row in found]


def shown(browser: webdriver.Chrome, kind: str = "*") -> list[str]:
    found = browser.find_elements(By.CSS_SELECTOR, f"#prompt > {kind}")
    return [str(span.get_property("textContent")) for span in found]


def test_a_chat_request_is_explained(browser: webdriver.Chrome, byte_server: Server) -> None:
    documents = [part(document(("page", i))) for i in range(3)]
    body = {**chat(*documents, part("Which?")), "vllm_xargs": CUT, "cache_salt": "page"}
    ask(byte_server, {**body, **chat(*documents[:2], part(document("another")), part("Which?"))}, CUT)
    found = explained(byte_server, body)
    assert [part["state"] for part in segments(found)] == ["resident", "resident", "absent"]
    del body["cache_salt"]
    submit(browser, json.dumps(body), salt="page")
    assert [row[0] for row in rows(browser)] == [part["kind"] for part in found["parts"]]
    assert [row[4] for row in rows(browser) if row[4]] == ["resident", "resident", "absent"]
    totals = browser.find_element(By.ID, "totals").text
    assert f"{found['prompt_tokens']} tokens: {found['tokens_reused']} reused" in totals
    assert f"{found['tokens_computed']} to compute" in totals and "pieces_cut 3" in totals
    assert "".join(shown(browser)) == "".join(r["text"] for part in found["parts"] for r in part["runs"])
    runs = [run for part in segments(found)[:2] for run in part["runs"] if not run["recomputed"]]
    assert [len(text) for text in shown(browser, ".cached")] == [r["stop"] - r["start"] for r in runs]
    assert len(shown(browser, ".missing")) == 1 and len(shown(browser, ".recomputed")) == 6
    submit(browser, json.dumps(body), salt="another")
    assert [row[4] for row in rows(browser) if row[4]] == ["absent"] * 3


def test_text_is_text(browser: webdriver.Chrome, byte_server: Server) -> None:
    prompt = (
        'A <script>document.title = "taken"</script> & <img src=x onerror="document.title=1"> &amp; {"a": 1}'
    )
    submit(browser, prompt)
    assert "".join(shown(browser)) == prompt and rows(browser)[0][0] == "stream"
    assert browser.title == "vllm-hypic: explain a request"
    assert browser.find_elements(By.CSS_SELECTOR, "#prompt script, #prompt img") == []
    assert "hypic_segment_mode is 'off'" in browser.find_element(By.ID, "reason").text
    submit(browser, json.dumps({"prompt": "x", "model": "<b>nobody</b>"}))
    error = browser.find_element(By.ID, "error")
    assert "HTTP 404" in error.text and "<b>nobody</b>" in error.text
    assert not browser.find_element(By.ID, "answer").is_displayed()
