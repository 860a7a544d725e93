"""The sentences of failures."""

from __future__ import annotations

from odevit_serve.errors import MissingExtra, UsageError, UserError, nearest


def test_a_missing_extra_names_the_command_for_a_package_and_for_a_checkout() -> None:
    told = str(MissingExtra("train", "no module named torch"))
    assert "(no module named torch)" in told
    assert "pip install 'odevit-serve[train]'" in told
    assert "pip install '.[train]'" in told


def test_bad_usage_and_failed_work_have_their_exit_codes() -> None:
    assert (UserError.exit_code, UsageError.exit_code, MissingExtra("demo").exit_code) == (1, 2, 1)


def test_the_nearest_name_is_offered_only_where_one_is_near() -> None:
    assert nearest("solver", "Hein", ("euler", "heun")) == (
        "unknown solver 'Hein': did you mean 'heun'? Known are euler, heun"
    )
    assert nearest("solver", "qqq", ("euler", "heun")) == "unknown solver 'qqq': Known are euler, heun"
