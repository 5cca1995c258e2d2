"""From a classpath to a trigger: what is found, and what is said where it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headgate.protocol.errors import ValueMalformed
from headgate.protocol.messages.runner import TriggerSpec
from headgate.protocol.values import encode_value
from headgate.runner import loading
from headgate.runner.loading import TriggerNotLoaded, import_class, load_trigger

TRIGGERS = """
from headgate.triggers.base import BaseTrigger, TriggerEvent

class Good(BaseTrigger):
    def __init__(self, n=0):
        self.n = n
    def serialize(self):
        return "loadable.Good", {"n": self.n}
    async def run(self):
        yield TriggerEvent(self.n)

class Outer:
    class Inner(Good):
        pass

class Abstract(BaseTrigger):
    pass

class Changeling(Good):
    def __new__(cls, **kwargs):
        return 7

class NotATrigger:
    pass

thing = Good()
"""


@pytest.fixture(autouse=True)
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Write a module of an author's into a folder on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    write("loadable.py", TRIGGERS)
    write("package/__init__.py", "")
    write("package/deep.py", TRIGGERS)
    yield write
    for name in set(sys.modules) - before:
        del sys.modules[name]


def spec(classpath: str, kwargs: object) -> TriggerSpec:
    return TriggerSpec(1, "run", "watcher", classpath, encode_value(kwargs, where="kwargs"))


@pytest.mark.parametrize(
    ("classpath", "qualname"),
    [
        ("loadable.Good", "Good"),
        ("loadable.Outer.Inner", "Outer.Inner"),
        ("package.deep.Good", "Good"),
        ("package.deep.Outer.Inner", "Outer.Inner"),
    ],
)
def test_a_classpath_names_a_class_of_a_module_or_one_nested_in_it(classpath: str, qualname: str) -> None:
    assert import_class(classpath).__qualname__ == qualname


def test_a_trigger_is_constructed_with_its_kwargs() -> None:
    trigger = load_trigger(spec("loadable.Good", {"n": 5}))
    assert trigger.serialize() == ("loadable.Good", {"n": 5})


@pytest.mark.parametrize(
    ("classpath", "sentence"),
    [
        ("absent.module.Trigger", "there is no module 'absent'"),
        ("loadable.Missing", "loadable has no Missing"),
        ("loadable.Outer.Missing", "loadable has no Outer.Missing"),
        ("package.absent.Trigger", "package has no absent.Trigger"),
    ],
)
def test_a_class_that_cannot_be_found_is_named_and_the_way_out_is_import_paths(classpath: str, sentence: str) -> None:
    with pytest.raises(TriggerNotLoaded) as caught:
        import_class(classpath)
    assert classpath in str(caught.value)
    assert sentence in str(caught.value)
    assert "import_paths" in str(caught.value)


@pytest.mark.parametrize("classpath", ["", "Good", ".Good", "loadable.", "loadable..Good", "..loadable.Good"])
def test_what_is_no_classpath_is_refused_as_such(classpath: str) -> None:
    with pytest.raises(TriggerNotLoaded, match="not of the form"):
        import_class(classpath)


@pytest.mark.parametrize("name", ["NotATrigger", "thing", "TriggerEvent"])
def test_something_else_than_a_trigger_class_is_refused(name: str) -> None:
    with pytest.raises(TriggerNotLoaded, match="is not a class derived from headgate"):
        import_class(f"loadable.{name}")


@pytest.mark.parametrize("classpath", ["importing.Trigger", "importing.Outer.Trigger"])
def test_a_module_that_imports_what_is_missing_is_reported_with_the_name_of_the_missing_one(
    write: Callable[[str, str], None], classpath: str
) -> None:
    write("importing.py", "import not_installed_anywhere\n")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        import_class(classpath)


def test_a_missing_sister_module_of_the_same_package_is_named_too(write: Callable[[str, str], None]) -> None:
    write("package/importing.py", "import package.sister\n")
    with pytest.raises(ModuleNotFoundError, match=r"package\.sister"):
        import_class("package.importing.Trigger")


@pytest.mark.parametrize(
    ("statement", "raised"),
    [("1 / 0", ZeroDivisionError), ("import sys; sys.exit(3)", SystemExit), ("def broken(:", SyntaxError)],
)
def test_what_a_module_raises_comes_through(
    write: Callable[[str, str], None], statement: str, raised: type[BaseException]
) -> None:
    write("raising.py", statement + "\n")
    with pytest.raises(raised):
        import_class("raising.Trigger")


def test_wrong_kwargs_and_abstract_classes_are_refused_by_python() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'm'"):
        load_trigger(spec("loadable.Good", {"m": 5}))
    with pytest.raises(TypeError, match="abstract"):
        load_trigger(spec("loadable.Abstract", {}))


def test_kwargs_that_are_no_dict_or_cannot_be_read_are_refused() -> None:
    with pytest.raises(TriggerNotLoaded, match="the kwargs of watcher are a list, not a dict"):
        load_trigger(spec("loadable.Good", [1]))
    with pytest.raises(ValueMalformed):
        load_trigger(TriggerSpec(1, "run", "watcher", "loadable.Good", b"\xff"))


def test_a_class_whose_new_makes_something_else_is_refused() -> None:
    with pytest.raises(TriggerNotLoaded, match=r"loadable\.Changeling constructs a int, not a trigger"):
        load_trigger(spec("loadable.Changeling", {}))


def test_a_module_that_has_changed_since_its_import_is_told_once_for_each_change(
    write: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_imported", {})
    monkeypatch.setattr(loading, "_told", {})
    spec = TriggerSpec(1, "run", "name", "loadable.Good", encode_value({}, where="kwargs"))
    with capture_logs() as told:
        load_trigger(spec)
        load_trigger(spec)
        assert told == []
        write("loadable.py", TRIGGERS + "\n# a change")
        load_trigger(spec)
        load_trigger(spec)
        (warning,) = told
        write("loadable.py", TRIGGERS + "\n# another change")
        load_trigger(spec)
    assert len(told) == 2
    assert warning["event"].startswith("the module of a trigger has changed since the runner imported it")
    assert (warning["log_level"], warning["module"]) == ("warning", "loadable")


def test_a_class_that_was_added_to_a_module_after_its_import_is_found_by_a_new_runner(
    write: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "_imported", {})
    load_trigger(TriggerSpec(1, "run", "name", "loadable.Good", encode_value({}, where="kwargs")))
    write("loadable.py", TRIGGERS + "\n\nclass Added(Good):\n    pass\n")
    with pytest.raises(TriggerNotLoaded) as caught:
        import_class("loadable.Added")
    assert "loadable has no Added; " in str(caught.value)
    assert "loadable.py has changed since the runner imported it: start headgate again" in str(caught.value)
