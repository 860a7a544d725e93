from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from odevit_serve.errors import UsageError
from odevit_serve.train.class_names import class_rows, shown_names
from odevit_serve.train.recipe import read_recipe


def test_imagenet_classes_by_name() -> None:
    names = ("tench", "English_springer", "cassette_player", "French horn", "n03425413", "parachute")
    assert class_rows(names, 1000) == [0, 217, 482, 566, 571, 701]
    with pytest.raises(UsageError, match="none called 'snark'"):
        class_rows(("snark",), 1000)


def test_people_read_names_and_the_config_keeps_the_ids() -> None:
    folders = ("n02123045", "n04146614", "my cat")
    assert shown_names(folders, {}) == ("tabby", "school bus", "my cat")
    config = read_recipe(None, ["data.names.n02123045='tabby cat'"]).model(3, folders)
    assert config.labels == ("tabby cat", "school bus", "my cat")
    assert config.class_ids == folders
    assert config.class_index() == {"n02123045": 0, "n04146614": 1, "my cat": 2, "tabby cat": 0, "school bus": 1}
    assert read_recipe(None).model(2, ("a", "b")).class_ids == ()  # nothing was renamed


def test_two_classes_never_share_a_name() -> None:
    cranes = ("n02012849", "n03126707")  # the bird and the machine
    assert shown_names(cranes, {}) == cranes
    assert shown_names(cranes, {"n02012849": "crane (bird)"}) == ("crane (bird)", "crane")


def test_a_name_for_a_class_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match=r"data\.names has 'n02123045', which is no class of the data"):
        shown_names(("a", "b"), {"n02123045": "tabby"})


@given(st.lists(st.text(min_size=1), unique=True), st.data())
def test_as_many_names_as_classes_and_each_once(classes: list[str], data: st.DataObject) -> None:
    chosen = {name: data.draw(st.sampled_from(["one", "two", *classes])) for name in classes[::2]}
    names = shown_names(classes, chosen)
    assert len(set(names)) == len(names) == len(classes)
