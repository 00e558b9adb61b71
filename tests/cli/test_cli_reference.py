import functools
from pathlib import Path

import pytest
from command_line import folder_with_net

from memfit.cli.reference import load, parse
from memfit.errors import InvalidModel


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    return folder_with_net(tmp_path, monkeypatch)


def parsed(text):
    reference = parse(text, InvalidModel)
    return reference.origin, reference.names, reference.args, dict(reference.kwargs)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("torchvision.models.resnet50", ("torchvision", ("models", "resnet50"), (), {})),
        ("torchvision.models.resnet50()", ("torchvision", ("models", "resnet50"), (), {})),
        (" a.b( n = 10 ) ", ("a", ("b",), (), {"n": 10})),
        ("package.module:Class", ("package.module", ("Class",), (), {})),
        ("package.module:Class.make", ("package.module", ("Class", "make"), (), {})),
        ('p.m:f(1, -2.5, name="x", flag=True)', ("p.m", ("f",), (1, -2.5), {"name": "x", "flag": True})),
        ('p.m:f([1, (2, None)], {"a": {3}})', ("p.m", ("f",), ([1, (2, None)], {"a": {3}}), {})),
        ('p.m:f("a.py:b")', ("p.m", ("f",), ("a.py:b",), {})),
        ('p.m.f("a:b")', ("p", ("m", "f"), ("a:b",), {})),
        ("./some (old)/file.py:make(2)", (Path("some (old)/file.py"), ("make",), (2,), {})),
        ("file.py:make", (Path("file.py"), ("make",), (), {})),
        ("C:\\models\\file.py:make", (Path("C:\\models\\file.py"), ("make",), (), {})),
    ],
)
def test_a_reference_is_read_as_a_name_and_literals(text, expected):
    assert parsed(text) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("resnet50", "no module to find it in"),
        ("a.b(", "cannot be read"),
        ("a.b(1))", "cannot be read"),
        ("a..b", "cannot be read"),
        ("p.m:", "cannot be read"),
        ("p.m:f(" + "(" * 300 + ")" * 301, "cannot be read"),
        ("p.m:f(" + "-" * 100_000 + "1)", ""),
        ("p.m:f\0", "cannot be read"),
        ("p-m:f", "'p-m' is not the name of a module"),
        ("./file.py", "no callable in it"),
        ("a.b + c.d", "'a.b + c.d' was found"),
        ("a.b()()", "'a.b()' was found"),
        ("a.b[0]()", "'a.b[0]' was found"),
        ("a.b(n=size)", "'size' is not a literal"),
        ("a.b(*[1])", "'*[1]' is not a literal"),
        ("a.b(**{'n': 1})", "are not written out"),
        ("a.b(n=1, n=2)", "'n' is given twice"),
        ("a.b(2 ** 99)", "'2 ** 99' is not a literal"),
        ("a.b({[]: 1})", "is not a literal"),
        ("a:b.__globals__", "'__globals__' is an inner name"),
    ],
)
def test_what_is_no_reference_is_refused_with_what_was_found(text, complaint):
    with pytest.raises(InvalidModel) as refused:
        parse(text, InvalidModel)
    assert complaint in str(refused.value)
    assert "package.module:callable" in str(refused.value)  # what to do


def test_a_function_in_a_package_is_found_though_a_submodule_has_its_name(folder):
    (folder / "package").mkdir()
    (folder / "package" / "__init__.py").write_text("from package.thing import thing\n")
    (folder / "package" / "thing.py").write_text("def thing(): return 'function'\n")
    (folder / "package" / "later.py").write_text("def make(): return 'later'\n")
    assert load(parse("package.thing()", InvalidModel))() == "function"
    assert load(parse("package.later.make()", InvalidModel))() == "later"
    assert load(parse("package:later.make", InvalidModel))() == "later"


def test_a_file_is_imported_once_and_finds_its_neighbours(folder):
    (folder / "sub").mkdir()
    (folder / "sub" / "neighbour_of_file.py").write_text("value = 7\n")
    (folder / "sub" / "file.py").write_text(
        "import neighbour_of_file\nfirst = []\ndef make(): return neighbour_of_file.value, first\n"
    )
    one, other = (load(parse("sub/file.py:make", InvalidModel)) for _ in range(2))
    assert one()[0] == 7
    assert one()[1] is other()[1]


def test_an_installed_package_is_not_replaced_by_a_file_that_lies_here(folder, monkeypatch):
    (folder / "installed").mkdir()
    (folder / "installed" / "package_in_two_places.py").write_text("def make(): return 'installed'\n")
    (folder / "package_in_two_places.py").write_text("def make(): return 'here'\n")
    monkeypatch.syspath_prepend(folder / "installed")
    assert load(parse("package_in_two_places:make", InvalidModel))() == "installed"


def test_a_partial_of_the_users_own_class_can_be_called():
    assert isinstance(load(parse("./net.py:half", InvalidModel)), functools.partial)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("no_such_package.models:f", "there is no module 'no_such_package'"),
        ("torch.no_such_module:f", "there is no module 'torch.no_such_module'"),
        ("./no_such_file.py:f", "there is no file 'no_such_file.py'"),
        ("./net.py:make_modle", "net.py has no 'make_modle'; did you mean make_model?"),
        ("torch.nn.Linaer(1, 2)", "torch.nn has no 'Linaer'; did you mean Linear"),
        ("./net.py:number", "cannot be called"),
        ("./broken.py:f", "ZeroDivisionError: division by zero"),
        ("./broken.py:f", "/broken.py:2"),
        ("./wants_more.py:f", "No module named 'no_such_dependency'"),
        ("./leaves.py:f", "SystemExit: enough"),
        ("./not_python.py:f", "SyntaxError"),
    ],
)
def test_what_cannot_be_loaded_is_explained(folder, text, complaint):
    (folder / "broken.py").write_text("x = 1\nx / 0\n")
    (folder / "wants_more.py").write_text("import no_such_dependency\n")
    (folder / "leaves.py").write_text("raise SystemExit('enough')\n")
    (folder / "not_python.py").write_text("def f(:\n")
    with pytest.raises(InvalidModel) as refused:
        load(parse(text, InvalidModel))
    assert complaint in str(refused.value)
    assert repr(text) in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "os:system",
        "os.system('ls')",
        "subprocess:run(['ls'])",
        "torch:os.system('ls')",
        "builtins:eval('1')",
        "./alias.py:f",
    ],
)
def test_the_standard_library_is_not_called(folder, text):
    (folder / "alias.py").write_text("from os import system as f\n")
    with pytest.raises(InvalidModel, match="standard library"):
        load(parse(text, InvalidModel))
