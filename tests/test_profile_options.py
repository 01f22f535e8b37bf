from __future__ import annotations

import pytest

from pd_profile.options import (
    InputShape,
    ModelName,
    parse_input_shape,
    parse_model,
    parse_model_args,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("resnet18", ModelName("resnet18", None)),
        ("examples/net.py:build", ModelName("build", "examples/net.py:build")),
        ("my.package:make_net", ModelName("make_net", "my.package:make_net")),
    ],
)
def test_model_is_a_torchvision_name_or_a_factory(text: str, expected: ModelName) -> None:
    assert parse_model(text) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("net.py", "'net.py' names a file; name its function too, as in net.py:build."),
        ("my.package", "'my.package' names a module; name its function too, as in my.package:build."),
        ("", "the name is empty; expected a torchvision model such as resnet18."),
        (":build", "':build' is no factory; expected path/file.py:function or package.module:function."),
        ("net.py:1x", "'net.py:1x' is no factory; expected path/file.py:function or package.module:function."),
    ],
)
def test_model_that_names_no_function_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_model(text)
    assert str(caught.value) == message


def test_model_arguments_are_json_scalars_or_text() -> None:
    texts = ("num_classes=10", "p=0.5", "pretrained=false", "weights=null", "norm=batch", 'name="7"', "x=NaN", "e=")
    assert parse_model_args(texts) == {
        "num_classes": 10,
        "p": 0.5,
        "pretrained": False,
        "weights": None,
        "norm": "batch",
        "name": "7",
        "x": "NaN",
        "e": "",
    }


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (("num_classes",), "found 'num_classes'; expected NAME=VALUE, as in num_classes=10."),
        (("2x=1",), "found '2x=1'; expected NAME=VALUE, as in num_classes=10."),
        (("a=1", "a=2"), "a is given twice; keep one of them."),
        (("a=[1]",), "a is '[1]'; a profile keeps numbers, true, false, null and text only."),
    ],
)
def test_bad_model_argument_is_refused(texts: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_model_args(texts)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("3,32,32", InputShape(None, (3, 32, 32), "float32")),
        ("image=3, 8, 8", InputShape("image", (3, 8, 8), "float32")),
        ("tokens=128:int64", InputShape("tokens", (128,), "int64")),
        ("idx=:int64", InputShape("idx", (), "int64")),
        ("x=", InputShape("x", (), "float32")),
        (":bool", InputShape(None, (), "bool")),
    ],
)
def test_input_shape_has_optional_name_and_dtype(text: str, expected: InputShape) -> None:
    assert parse_input_shape(text) == expected


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "found nothing"),
        ("3,,32", "found '' as a dimension"),
        ("3,0,32", "found '0' as a dimension"),
        ("-3", "found '-3' as a dimension"),
        ("3x32x32", "found '3x32x32' as a dimension"),
        ("3,32:int", "found the dtype 'int' in '3,32:int'; expected one of float32,"),
        ("1a=3", "found the name '1a'"),
    ],
)
def test_bad_input_shape_is_refused(text: str, part: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse_input_shape(text)
    assert str(caught.value).startswith(part)
