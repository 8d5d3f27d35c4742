"""The files around the nodes: help pages, translations, workflows, README, changelog."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from leandit.nodes import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

ROOT = Path(__file__).resolve().parent.parent
NODES = sorted(NODE_CLASS_MAPPINGS)
WORKFLOWS = sorted((ROOT / "example_workflows").glob("*.json"))


def inputs_of(name: str) -> dict[str, Any]:
    return {
        key: value
        for kind, group in NODE_CLASS_MAPPINGS[name].INPUT_TYPES().items()
        if kind != "hidden"
        for key, value in group.items()
    }


@pytest.mark.parametrize("name", NODES)
def test_every_input_has_a_tooltip_and_every_output_too(name: str) -> None:
    for key, (_kind, options) in inputs_of(name).items():
        assert len(options["tooltip"]) > 20, key
    node = NODE_CLASS_MAPPINGS[name]
    assert len(node.OUTPUT_TOOLTIPS) == len(node.RETURN_TYPES) == len(node.RETURN_NAMES)
    assert len(node.DESCRIPTION) > 40
    assert name in NODE_DISPLAY_NAME_MAPPINGS


@pytest.mark.parametrize("name", NODES)
def test_the_help_page_explains_every_input(name: str) -> None:
    page = (ROOT / "web/docs" / f"{name}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {NODE_DISPLAY_NAME_MAPPINGS[name]}\n")
    for key in inputs_of(name):
        if key != "model":
            assert key in page, key


@pytest.mark.parametrize("language", ["en", "zh"])
def test_translations_name_real_nodes_and_inputs(language: str) -> None:
    path = ROOT / "locales" / language / "nodeDefs.json"
    for name, texts in json.loads(path.read_text(encoding="utf-8")).items():
        assert set(texts.get("inputs", {})) <= set(inputs_of(name))
        if language == "en":
            assert texts["display_name"] == NODE_DISPLAY_NAME_MAPPINGS[name]


def test_every_node_is_translated_to_chinese() -> None:
    texts = json.loads((ROOT / "locales/zh/nodeDefs.json").read_text(encoding="utf-8"))
    assert set(texts) == set(NODES)
    for name in NODES:
        assert set(texts[name]["inputs"]) == set(inputs_of(name))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_an_example_workflow_is_consistent_and_has_an_api_twin(path: Path) -> None:
    graph = json.loads(path.read_text(encoding="utf-8"))
    twin = json.loads((path.parent / "api" / path.name).read_text(encoding="utf-8"))
    nodes = {node["id"]: node for node in graph["nodes"]}
    assert set(twin) <= {str(key) for key in nodes}
    for link, source, slot, target, entry, kind in graph["links"]:
        assert link in nodes[source]["outputs"][slot]["links"]
        assert nodes[source]["outputs"][slot]["type"] == kind
        assert nodes[target]["inputs"][entry]["link"] == link
        name = nodes[target]["inputs"][entry]["name"]
        assert twin[str(target)]["inputs"][name] == [str(source), slot]
    ours = [node for node in graph["nodes"] if node["type"] in NODE_CLASS_MAPPINGS]
    assert ours
    for node in ours:
        inputs = inputs_of(node["type"])
        widgets = [key for key, (kind, _) in inputs.items() if kind not in ("MODEL",)]
        assert len(node["widgets_values"]) == len(widgets)
        given = twin[str(node["id"])]["inputs"]
        assert set(given) == set(inputs)
        for key, value in zip(widgets, node["widgets_values"], strict=True):
            assert given[key] == value
            choices = inputs[key][0]
            # The list of model files is empty without ComfyUI, and another one on every machine.
            assert key == "model_name" or not isinstance(choices, list) or value in choices


def test_every_node_stands_in_an_example_workflow() -> None:
    shown = set()
    for path in WORKFLOWS:
        graph = json.loads(path.read_text(encoding="utf-8"))
        shown |= {node["type"] for node in graph["nodes"]}
    assert set(NODES) <= shown


def test_the_readme_begins_with_the_two_commands() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    block = lines.index("```")
    assert lines[block + 1 : block + 3] == [
        "pip install -e . && leandit demo",
        'pip install -e ".[test]" && pytest',
    ]
    assert not [line for line in lines[:block] if line and not line.startswith("#")]


def test_every_leandit_command_in_the_docs_parses() -> None:
    from leandit.cli import _parser

    texts = [ROOT / "README.md", *(ROOT / "web/docs").glob("*.md"), ROOT / "demo/README.md"]
    commands = []
    for path in texts:
        for block in re.findall(r"```\w*\n(.*?)```", path.read_text(encoding="utf-8"), re.S):
            commands += re.findall(r"(?:^|&& )(?:python -m )?leandit ([^&\n]*)", block, re.M)
    assert "demo" in [command.strip() for command in commands]
    for command in commands:
        _parser().parse_args(shlex.split(command, comments=True))


def test_the_changelog_has_the_version() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    version = re.search(r'^version = "(.+)"$', project, re.M)
    assert version is not None
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_requirements_never_name_torch() -> None:
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    assert not [line for line in lines if line.strip() and not line.startswith("#")]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_no_node_of_an_example_lies_on_another(path: Path) -> None:
    nodes = json.loads(path.read_text(encoding="utf-8"))["nodes"]
    for index, one in enumerate(nodes):
        for other in nodes[:index]:
            (x, y), (w, h) = one["pos"], one["size"]
            (left, top), (width, height) = other["pos"], other["size"]
            apart = x + w <= left or left + width <= x or y + h <= top or top + height <= y
            assert apart, (one["type"], other["type"])
