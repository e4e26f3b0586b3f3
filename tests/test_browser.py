"""The built book in a real browser: from files, with the network off, in both themes, wide and narrow."""
import os
import re
import shutil
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from conftest import pages

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PLACES = ("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome", "/Applications/Chromium.app/Contents/MacOS/Chromium")
# What the theme and its parts get wrong in their own markup, outside the pages' content.
NOT_OURS = {
    "label-content-name-mismatch": ".search-button",
}


def browser_path():
    "Where a Chromium or Chrome is, or None."
    found = [shutil.which(name) for name in NAMES] + [place for place in PLACES if Path(place).exists()]
    return next(filter(None, found), None)


@pytest.fixture(scope="session")
def context():
    path = browser_path()
    if path is None:
        how = "no Chromium or Chrome found: install one (Debian, Ubuntu: apt install chromium; macOS: brew install --cask chromium)"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(how)
    from playwright.sync_api import sync_playwright
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu", "--no-first-run",
                                             "--disable-background-networking", "--disable-component-update", "--disable-sync"])
        context = browser.new_context(offline=True, color_scheme="light", viewport={"width": 1280, "height": 900})
        yield context
        browser.close()


@pytest.fixture
def visit(context, html):
    "Open a page of the book; on leaving, nothing may have gone wrong in it."
    trouble, opened = [], []

    def open_page(name, query=""):
        page = context.new_page()
        opened.append(page)
        page.on("console", lambda m: trouble.append(m.text) if m.type == "error" else None)
        page.on("pageerror", lambda e: trouble.append(str(e)))
        page.on("requestfailed", lambda r: trouble.append(f"failed: {r.url[:200]}"))
        page.on("request", lambda r: trouble.append(f"asks {r.url[:200]}") if re.match("(https?|wss?):", r.url) else None)
        page.goto(f"{(html / name).as_uri()}.html{query}")
        page.evaluate("window.MathJax?.startup?.promise")
        return page

    yield open_page
    for page in opened:
        page.close()
    assert not trouble, trouble


def set_theme(page, theme):
    page.add_style_tag(content="* { transition: none !important }")      # colours are measured at once
    page.evaluate("theme => { document.documentElement.dataset.theme = theme; document.documentElement.dataset.mode = theme }", theme)


def broken_figures(page):
    "Figures of which not exactly one theme's images are loaded and shown."
    return page.evaluate("""() => [...document.querySelectorAll('.book-figure')].filter(f => {
        if (!f.offsetParent) return false;                               // a page of a flip book that is not turned up
        const shown = [...f.querySelectorAll('img')].filter(i => i.offsetWidth > 0);
        const theme = document.documentElement.dataset.theme;
        return !shown.length || shown.length * 2 != f.querySelectorAll('img').length
            || shown.some(i => !i.complete || !i.naturalWidth || !i.classList.contains('only-' + theme)
                               || getComputedStyle(i).backgroundColor != 'rgba(0, 0, 0, 0)');
    }).length""")


def axe_findings(page):
    "What axe finds against WCAG 2.1 A and AA, and in the order of headings."
    rules = {"runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa"]}, 
             "rules": {"heading-order": {"enabled": True}}, "preload": False}
    found = []
    for violation in Axe().run(page, options=rules).response["violations"]:
        for node in violation["nodes"]:
            if NOT_OURS.get(violation["id"], "\0") not in str(node["html"]) + str(node["target"]):
                found.append(f"{violation['id']}: {node['target']} {node['html'][:150]}")
    return found


@pytest.mark.parametrize("name", pages())
def test_page(visit, name):
    page = visit(name)
    # Mathematics
    assert page.evaluate("document.querySelectorAll('mjx-merror, [data-mjx-error], mjx-container [data-mml-node=merror]').length") == 0
    missing = page.evaluate("[...document.querySelectorAll('.math')].filter(e => !e.querySelector('mjx-container')).length")
    assert missing == 0, f"{missing} formulas are not typeset"
    text = page.evaluate("""() => { const copy = document.querySelector('article').cloneNode(true);
        copy.querySelectorAll('pre, code, script, mjx-container').forEach(e => e.remove()); return copy.textContent; }""")
    assert "$" not in text and "\\(" not in text, text[max(0, text.find("$") - 40):][:120]
    # One title, headings in order, figures and contrast, in both themes
    assert page.locator("article h1").count() == 1
    for theme in ("light", "dark"):
        set_theme(page, theme)
        assert broken_figures(page) == 0, theme
        assert not (findings := axe_findings(page)), "\n".join([theme, *findings])
    # A phone: nothing sticks out, and the smallest text of every figure is readable
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    scales = page.evaluate("""() => [...document.querySelectorAll('.book-figure img')].filter(i => i.offsetWidth > 0)
                              .map(i => i.clientWidth / i.naturalWidth)""")
    assert all(scale * 12 >= 9 for scale in scales), scales              # ticks are 12 px (9 points) at full size


def test_theorem_links_jump(visit):
    page = visit("nbs/foundations/01_attention")
    link = page.locator("article a", has_text=re.compile(r"^Theorem 2\.\d")).first
    target = link.get_attribute("href")
    link.click()
    assert page.evaluate("location.hash") == target[target.index("#"):]
    assert page.locator(target[target.index("#"):]).is_visible()


def test_slider_answers_without_a_kernel(visit):
    page = visit("nbs/compiler/00_heads")
    slider = page.locator(".widget-slider [role=slider], .widget-slider .noUi-handle").first
    slider.wait_for(state="visible")
    shown = page.locator(".jupyter-widgets .book-figure:visible img:visible")
    first = shown.first.get_attribute("alt")
    slider.focus()
    for _ in range(5):
        page.keyboard.press("ArrowRight")
    page.wait_for_function("before => [...document.querySelectorAll('.jupyter-widgets .book-figure img')]"
                           ".find(i => i.offsetWidth > 0).alt != before", arg=first)
    assert "at scale 0" in first and "at scale 5" in shown.first.get_attribute("alt")
    box = page.locator(".widget-slider .noUi-base, .widget-slider .slider").first.bounding_box()
    page.mouse.click(box["x"] + box["width"] - 2, box["y"] + box["height"] / 2)
    page.wait_for_function("[...document.querySelectorAll('.jupyter-widgets .book-figure img')].find(i => i.offsetWidth > 0).alt.includes('at scale 10')")
    assert slider.get_attribute("aria-label")
    page.wait_for_function("document.querySelector('.widget-slider [role=slider]').getAttribute('aria-valuetext') == '10'")


def test_search_works_from_files(visit):
    page = visit("search", "?q=halfspace")
    page.locator("#search-results li a").first.wait_for()
    assert page.locator("#search-results li a", has_text="attention head").count() >= 1


def test_reading_aids(visit):
    page = visit("nbs/foundations/01_attention")
    assert page.locator("a.left-prev").get_attribute("href").endswith("00_boolean.html")
    assert page.locator("a.right-next").get_attribute("href").endswith("02_norms.html")
    assert page.locator("button.copybtn").count() >= 10
    folded = page.locator("details.hide", has_text="Show the test").first
    folded.locator("summary").click()
    assert folded.locator("pre").first.is_visible()
    seen = set()
    for _ in range(3):                                                   # auto, light, dark
        page.locator("button.theme-switch-button").first.click()
        seen.add(page.evaluate("[document.documentElement.dataset.theme, "
                               "getComputedStyle(document.body).backgroundColor].join(' ')"))
        assert broken_figures(page) == 0
    assert len(seen) == 2, seen
