"""The site is built without a warning, leads nowhere that is not there, and asks no other host for anything."""

import functools
import importlib
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from urllib.parse import unquote, urldefrag, urlsplit

import pytest
from helpers import ROOT
from launching import environment
from pages import fences

import learnerkit
from learnerkit.events import Event

NBS = ROOT / "nbs"
PAGES = sorted(page for page in NBS.rglob("*.md") if "_build" not in page.parts and page.name != "examples.md")
MODULES = ("datasets", "distributed", "sweep", "world")
SECOND = ("ParallelCallback",)  # the same class as another
NAMES = sorted({*learnerkit.__all__, *learnerkit._UNLISTED} - {*MODULES, *SECOND})
DISTRIBUTED = ("all_gather", "barrier", "broadcast", "is_main", "local_rank", "rank", "reduce", "world_size")
INTERNAL = {  # methods without an underscore that are for other parts of the package
    "DataLoaders": {
        "count", "keeps", "prefer", "samples_first", "split", "takes_targets", "twin",
    }
}  # fmt: skip


# The pages as they are written


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(NBS)))
def test_code_is_copied_without_prompts(page):
    language = r"(?:\{code-block\} )?(?:python|sh|shell|bash|console)"
    fences = re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.M | re.S)
    for line in "".join(fences).splitlines():
        assert not re.match(r"\s*(\$ |>>> |\.\.\. |In \[\d+\]: |%|!)", line), line


def test_the_readmes_program_is_on_the_first_page():
    readme = re.search(r"^```python\n.*?^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert readme[0] in (NBS / "index.md").read_text()


def test_the_figures_of_the_first_page_are_measured():
    index = (NBS / "index.md").read_text()
    measured = json.loads((NBS / "explanations" / "costs.json").read_text())
    steps = {row[0].split(" 0.")[0].split(",")[0].strip(): row[1] for row in reversed(measured["peers"]["rows"])}
    steps = {name.split()[0]: figure.split("x ")[1] for name, figure in steps.items() if "us, x " in figure}
    assert f"takes {steps['learnerkit']} times" in index
    assert f"with fastai {steps['fastai']} times, with Lightning {steps['Lightning']} times" in index
    (saving,) = [row[1] for row in measured["checkpoint"]["rows"] if row[0].strip() == "in the background"]
    assert f"for {float(saving):.2f} of the time of `torch.save`" in index
    (differs,) = re.findall(r"differ by (\S+) in float64", index)
    assert f"{differs} in float64" in (NBS / "explanations" / "equal.md").read_text()


def test_each_method_of_the_learner_has_an_example():
    found = set(re.findall(r"^## (Learner\.\w+)$", (NBS / "reference" / "examples.md").read_text(), re.M))
    properties = {f"Learner.{n}" for n, x in vars(learnerkit.Learner).items() if isinstance(x, property)}
    ends = {"Learner.detach_parallel", "Learner.detach_distributed"}  # in the examples of what they end
    assert found == set(members("Learner")) - properties - ends


def test_lines_of_code_are_as_wide_as_their_box():
    # At 1280 pixels site.css makes room for 120 characters, and columns.html for twice 66. What is printed is wrapped.
    code = [(page.name, fence.code) for page in PAGES for fence in fences(page.read_text()) if fence.language != "text"]
    for notebook in NBS.glob("*.ipynb"):
        cells = json.loads(notebook.read_text())["cells"]
        code += [(notebook.name, "".join(cell["source"])) for cell in cells if cell["cell_type"] == "code"]
    assert not [(name, line) for name, text in code for line in text.splitlines() if len(line) > 120]
    programs = [(path.name, path.read_text()) for path in (NBS / "coming_from").glob("*.py")]
    assert not [(name, line) for name, text in programs for line in text.splitlines() if len(line) > 66]


@pytest.mark.parametrize("notebook", sorted(NBS.glob("*.ipynb")), ids=lambda path: path.stem)
def test_pictures_are_described(notebook):
    for cell in json.loads(notebook.read_text())["cells"]:
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", ())):
            assert len(cell["metadata"]["mystnb"]["image"]["alt"].split()) >= 5, cell["id"]


def test_every_public_name_is_on_one_page_of_the_reference():
    pages = "\n".join(page.read_text() for page in (NBS / "reference").glob("*.md"))
    written = re.findall(r"^\.\. auto\w+:: learnerkit\.([\w.]+)$", pages, re.M)
    at_top = [name for name in written if "." not in name]
    assert sorted(at_top) == sorted([*NAMES, "datasets", "distributed"])
    assert {*learnerkit._OLD.values()} <= {*written}
    assert len(written) == len({*written})


# The site


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder of the site, built once."""
    pytest.importorskip("furo")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, str(NBS / "build.py"), "--out", str(out)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert f"the site is in {out / 'html'}" in done.stdout
    return out / "html"


class Page(HTMLParser):
    """A page: the ids in it, where it links to, and what a browser fetches with it."""

    RELATIONS = {"author", "canonical", "copyright", "index", "next", "prev", "search", "top", "up"}  # not fetched

    def __init__(self, text):
        super().__init__()
        self.ids, self.links, self.fetched = set(), [], []
        self.alts: list[str] = []  # of pictures
        self.about: dict[str, str] = {}  # what the head says of the page
        self.blocks: set[str] = set()  # languages of blocks of code
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        found = {name: value or "" for name, value in attrs}
        self.ids.update(found[name] for name in ("id", "name") if name in found)
        is_link = tag in ("a", "area") or (tag == "link" and set(found.get("rel", "").split()) <= self.RELATIONS)
        for name in ("href", "xlink:href", "src", "data", "poster", "action"):
            if name in found:
                (self.links if is_link else self.fetched).append(found[name])
        self.fetched += [part.split()[0] for part in found.get("srcset", "").split(",") if part.strip()]
        self.fetched += addresses_in(found.get("style", ""))
        if tag == "img":
            self.alts.append(found.get("alt", ""))
        elif tag == "meta":
            self.about[found.get("name", "")] = found.get("content", "")
        self.blocks |= set(re.findall(r"\bhighlight-([\w-]+)", found.get("class", "")))


def addresses_in(css):
    """What a style sheet, or a style attribute, fetches."""
    css = re.sub(r"/\*.*?\*/", "", css, flags=re.S)
    found = re.findall(r"""url\(\s*(?:"([^"]*)"|'([^']*)'|([^)]*))\s*\)|@import\s+["']([^"']*)["']""", css)
    return [next(filter(None, each), "") for each in found]


@functools.cache
def parsed(path):
    """A page of the site, read once."""
    return Page(path.read_text(encoding="utf-8"))


def is_elsewhere(address):
    """Whether that is on another host."""
    return bool(urlsplit(address).netloc) or urlsplit(address).scheme not in ("", "data")


def test_what_is_fetched_is_found():
    page = Page('<link rel="stylesheet" href="a.css"><link rel="next" href="b"><a href="c" style="x: url( \'d\' )">')
    assert (page.fetched, page.links) == (["a.css", "d"], ["b", "c"])
    assert addresses_in('@import "https://x/a.css"; /* url(no) */ b { c: url(//x/d) }') == ["https://x/a.css", "//x/d"]
    assert [is_elsewhere(a) for a in ("//x/d", "https://x", "a/b.png", "data:image/png;base64,x")] == [1, 1, 0, 0]


@pytest.mark.soak
def test_nothing_is_fetched_from_another_host(site):
    fetched = {(path.name, address) for path in site.rglob("*.html") for address in parsed(path).fetched}
    fetched |= {(path.name, address) for path in site.rglob("*.css") for address in addresses_in(path.read_text())}
    assert len(fetched) > 100
    assert not [each for each in fetched if is_elsewhere(each[1])]


@pytest.mark.soak
def test_every_link_leads_somewhere(site):
    wrong = []
    for page in site.rglob("*.html"):
        for link in {*parsed(page).links, *parsed(page).fetched}:
            if urlsplit(link).scheme or urlsplit(link).netloc:
                continue
            address, anchor = urldefrag(link)
            target = (page.parent / unquote(urlsplit(address).path)).resolve() if address else page
            is_there = target.is_file()
            if is_there and anchor and target.suffix == ".html":
                is_there = unquote(anchor) in parsed(target).ids
            if not is_there:
                wrong.append((page.relative_to(site), link))
    assert not wrong


@pytest.mark.soak
def test_the_site_is_small(site):
    assert sum(file.stat().st_size for file in site.rglob("*") if file.is_file()) <= 20 * 10**6


@pytest.mark.soak
def test_pages_say_what_they_are_about_and_what_pictures_show(site):
    pages = [parsed(site / page.relative_to(NBS).with_suffix(".html")) for page in [*PAGES, *NBS.glob("*.ipynb")]]
    assert all(page.about.get("description") for page in pages)
    alts = [alt for page in pages for alt in page.alts]
    assert len(alts) > 30
    assert not [alt for alt in alts if len(alt.split()) < 5]


@pytest.mark.soak
def test_all_code_can_be_copied(site):
    languages = {language for path in site.rglob("*.html") for language in parsed(path).blocks}
    copied = set(re.findall(r"highlight-(\w+) pre", (site / "_static" / "copybutton.js").read_text()))
    printed = {"text", "diff", "markdown", "html", "myst-ansi"}
    assert {"python", "ipython3", "sh"} <= copied
    assert languages - copied <= printed


@pytest.mark.soak
@pytest.mark.parametrize("page", ["index.html", "guides/images.html", "reference/learner.html"])
def test_the_sidebar_has_the_captions_of_the_guides(site, page):
    captions = re.findall(r"^:caption: (.*)$", (NBS / "guides.md").read_text(), re.M)
    assert len(captions) > 3
    assert re.findall(r'<li class="toc-caption">(.*?)</li>', (site / page).read_text()) == captions


@pytest.mark.soak
def test_the_search_knows_the_parts_of_names(site):
    index = json.loads((site / "searchindex.js").read_text().removeprefix("Search.setIndex(").removesuffix(")"))

    def pages_with(stem):
        found = [index[kind].get(stem, []) for kind in ("terms", "titleterms")]
        return {index["docnames"][i] for each in found for i in (each if isinstance(each, list) else [each])}

    assert {"index", "guides/images", "coming_from/fastai"} <= pages_with("resnet") & pages_with("resnet34")
    assert "guides/install" in pages_with("instal") & pages_with("gpu")
    script = (site / "_static" / "search-texts.js").read_text()
    texts = json.loads(script.removeprefix("const searchTexts = ").removesuffix(";\n"))
    assert texts.keys() == {str(page.relative_to(NBS).with_suffix("")) for page in NBS.glob("*.ipynb")} | {
        str(page.relative_to(NBS).with_suffix("")) for page in PAGES
    }


# The reference


@pytest.fixture(scope="session")
def documented(site):
    """The Python names of the site, and the page of each."""
    data = (site / "objects.inv").read_bytes()
    for _ in range(4):  # lines of the header
        data = data.partition(b"\n")[2]
    lines = [line.split(" ", 4) for line in zlib.decompress(data).decode().splitlines()]
    found = [(name, page) for name, kind, priority, page, _ in lines if kind.startswith("py:") and priority != "-1"]
    return {name: page.partition("#")[0] for name, page in found}  # without the second names of these


def members(name):
    """The methods and properties that a public class has for its users."""
    kind = getattr(learnerkit, name)
    if not inspect.isclass(kind):
        return []
    found = {n for n, x in vars(kind).items() if inspect.isfunction(x) or isinstance(x, property | classmethod)}
    if name != "Callback" and issubclass(kind, learnerkit.Callback):
        found -= {*Event, "state_dict", "load_state_dict", "name"}
    found -= INTERNAL.get(name, set())
    bases = [vars(base) for base in kind.__mro__[1:]]
    said_before = {n for n in found if not vars(kind)[n].__doc__ and any(n in base for base in bases)}
    return [f"{name}.{n}" for n in sorted(found - said_before) if not n.startswith("_")]


@pytest.mark.soak
def test_the_reference_has_every_public_name_once(documented):
    wanted = [
        *NAMES,
        *(member for name in NAMES for member in members(name)),
        *(f"distributed.{name}" for name in DISTRIBUTED),
    ]
    for module in ("datasets", "sweep"):
        found = vars(importlib.import_module(f"learnerkit.{module}"))
        own = [n for n, x in found.items() if inspect.isfunction(x) and x.__module__.startswith(f"learnerkit.{module}")]
        wanted += [f"{module}.{name}" for name in own if not name.startswith("_")]
    missing = [name for name in wanted if not documented.get(f"learnerkit.{name}", "").startswith("reference/")]
    assert not missing, ", ".join(missing)
    for name in NAMES:
        at_home = f"{learnerkit._home_of[name]}.{name}"
        assert f"learnerkit.{at_home}" not in documented


@pytest.mark.soak
def test_events_and_commands_are_drawn_from_the_code(site):
    page = parsed(site / "reference" / "events.html")
    assert {f"event-{event}" for event in Event} <= page.ids
    commands = (site / "reference" / "commands.html").read_text()
    for option in ("--max-restarts", "--join", "--write-sbatch", "--nproc"):
        assert option in commands


@pytest.mark.soak
def test_what_an_attribute_is_may_have_a_colon(site):
    text = re.sub(r"<[^>]*>", "", (site / "reference" / "learner.html").read_text())
    assert "The predictions: the model" in text


# In a browser


OWN = "not an origin"  # what Chromium writes of a request that it makes for itself, as for updates
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def opened(address, folder):
    """What a page has become in a browser without a network, its errors, and what it has asked for."""
    off = ["background-networking", "component-update", "default-apps", "domain-reliability", "sync", "gpu"]
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--no-first-run", f"--user-data-dir={folder / 'profile'}",
        *(f"--disable-{name}" for name in off), "--host-resolver-rules=MAP * ~NOTFOUND", "--enable-logging=stderr",
        f"--log-net-log={folder / 'net.json'}", "--net-log-capture-mode=Default", "--virtual-time-budget=5000",
        "--dump-dom", address,
    ]  # fmt: skip
    environ = {**os.environ, "HOME": str(folder)}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    log = json.loads((folder / "net.json").read_text())
    events = [event.get("params", {}) for event in log["events"]]
    by_page = [event["url"] for event in events if event.get("initiator", OWN) != OWN and "url" in event]
    return done.stdout, said, {url for url in by_page if not url.startswith(("file:", "data:", "chrome", "about:"))}


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_request_to_another_host_would_be_seen(tmp_path):
    page = tmp_path / "page.html"
    page.write_text('<link rel="stylesheet" href="https://fonts.invalid/a.css"><script>console.error("wrong")</script>')
    _, said, asked = opened(page.as_uri(), tmp_path)
    assert len(said) >= 1
    assert asked == {"https://fonts.invalid/a.css"}


@pytest.mark.soak
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(
    "name", ["index.html", "01_getting_started.html", "reference/learner.html", "search.html?q=distrib_ctx"]
)
def test_a_page_works_without_a_network(site, tmp_path, name):
    text, said, asked = opened(f"{site.as_uri()}/{name}", tmp_path)
    assert (said, asked) == ([], set())
    assert "learnerkit" in text
    if "?" in name:
        assert "reference/learner.html" in text  # among what was found
        assert 'class="search-excerpt"' in text
