"""Settings: where they are looked for, and what is said when they are wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy.engine import make_url

from headgate.protocol.messages.runner import RunnerSettings
from headgate.store.db.engine import open_engine
from headgate.store.errors import UnsupportedDatabase
from headgate.supervisor import setting_sources
from headgate.supervisor.children.process import environment_of_children
from headgate.supervisor.config import ConfigError, Settings, masked
from headgate.supervisor.setting_sources import resolve_settings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


def load(folder: Path, environ: dict[str, str] | None = None, **flags: Any) -> Settings:
    environ = {"HEADGATE_HOME": str(folder / "home")} | (environ or {})
    return resolve_settings(flags=flags, environ=environ, cwd=folder).settings


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_with_nothing_set_every_setting_has_its_default(folder: Path) -> None:
    settings = load(folder)

    assert settings.capacity == 1000
    assert settings.queues == ("default",)
    assert settings.database_url == f"sqlite:///{folder}/home/headgate.db"
    assert settings.import_paths == (str(folder),)


def test_later_places_win_over_earlier_ones(folder: Path) -> None:
    assert load(folder).capacity == 1000
    write(folder / "headgate.toml", "capacity = 10")
    assert load(folder).capacity == 10
    assert load(folder, {"HEADGATE_CAPACITY": "20"}).capacity == 20
    assert load(folder, {"HEADGATE_CAPACITY": "20"}, capacity=30).capacity == 30


def test_a_flag_that_was_not_given_changes_nothing(folder: Path) -> None:
    assert load(folder, {"HEADGATE_CAPACITY": "20"}, capacity=None).capacity == 20


def test_the_named_file_wins_over_the_one_here_and_that_over_the_one_at_home(folder: Path) -> None:
    write(folder / "home" / "headgate.toml", "capacity = 1")
    assert load(folder).capacity == 1
    write(folder / "headgate.toml", "capacity = 2")
    assert load(folder).capacity == 2
    named = write(folder / "elsewhere" / "other.toml", "capacity = 3")
    assert load(folder, config=named).capacity == 3


def test_a_named_file_that_is_missing_is_an_error_and_not_a_default(folder: Path) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"there is no file {folder}/nowhere.toml")):
        load(folder, config="nowhere.toml")


def test_lists_are_written_as_arrays_in_the_file_and_with_commas_elsewhere(folder: Path) -> None:
    write(folder / "headgate.toml", 'queues = ["a", "b"]')
    assert load(folder).queues == ("a", "b")
    assert load(folder, {"HEADGATE_QUEUES": "c, d"}).queues == ("c", "d")
    assert load(folder, queues="e,f").queues == ("e", "f")


def test_relative_paths_are_taken_from_where_they_are_written(folder: Path) -> None:
    file = write(folder / "etc" / "headgate.toml", 'import_paths = ["triggers"]\ncapture = "frames"')

    settings = load(folder, config=file)

    assert settings.import_paths == (str(folder / "etc" / "triggers"),)
    assert settings.capture == folder / "etc" / "frames"
    assert load(folder, capture="frames").capture == folder / "frames"
    assert load(folder, {"HEADGATE_IMPORT_PATHS": "/a,b"}).import_paths == ("/a", str(folder / "b"))


def test_the_database_stands_in_the_home_folder_wherever_home_was_set(folder: Path) -> None:
    assert load(folder, home="there").database_url == f"sqlite:///{folder}/there/headgate.db"
    assert Settings(home=Path("/h")).database_url == "sqlite:////h/headgate.db"


@pytest.mark.parametrize("home", ["is it?", "100%41", "a b#c"])
def test_a_home_folder_may_have_any_name(folder: Path, home: str) -> None:
    engine = open_engine(load(folder, home=home).database_url)
    assert engine.url.database == f"{folder}/{home}/headgate.db"


def test_the_path_of_a_sqlite_url_is_relative_to_where_it_is_written(folder: Path) -> None:
    file = write(folder / "etc" / "headgate.toml", 'database_url = "sqlite:///data/%3Fx.db"')

    assert load(folder, config=file).database_url == f"sqlite:///{folder}/etc/data/%3Fx.db"
    assert load(folder, database_url="sqlite:///x.db").database_url == f"sqlite:///{folder}/x.db"
    assert load(folder, database_url="sqlite+pysqlite:////x.db").database_url == "sqlite+pysqlite:////x.db"
    with pytest.raises(UnsupportedDatabase, match="takes no parameters"):
        open_engine(load(folder, database_url="sqlite:///x.db?timeout=0").database_url)


def test_no_child_gets_what_opens_the_database(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = "postgresql://u:hunter%402@h/db?password=hunter3"
    settings = load(
        folder, {"HEADGATE_DATABASE_URL": url, "HEADGATE_FERNET_KEYS": "hunter4, hunter5", "HEADGATE_PASS_ENV": "MY_*"}
    )
    for number, value in enumerate(
        ["hunter@2", "postgres://u:hunter%402@h/db", "x=hunter3", "hunter4", "hunter5", "x"]
    ):
        monkeypatch.setenv(f"MY_{number}", value)

    given = environment_of_children(settings, make_url(url))

    assert {name: value for name, value in given.items() if name.startswith("MY_")} == {"MY_5": "x"}


def test_an_unknown_key_in_the_file_is_named_with_its_nearest_neighbour(folder: Path) -> None:
    file = write(folder / "headgate.toml", "capasity = 10")

    with pytest.raises(ConfigError) as caught:
        load(folder)

    assert caught.value.key == "capasity"
    assert caught.value.source == str(file)
    assert str(caught.value) == f"unknown key 'capasity'; did you mean 'capacity'? ({file})"


@pytest.mark.parametrize("name", ["HEADGATE_CAPASITY", "HEADGATE_Capacity"])
def test_an_unknown_variable_is_named_with_its_nearest_neighbour(folder: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown variable {name}; did you mean 'HEADGATE_CAPACITY'"):
        load(folder, {name: "10"})


def test_reserved_and_foreign_variables_are_left_alone(folder: Path) -> None:
    load(
        folder,
        {
            "HEADGATE_CONN_KAFKA": "x",
            "HEADGATE_VAR_A": "y",
            "HEADGATE_TEST_URL": "t",
            "HEADGATES": "z",
            "CAPACITY": "many",
        },
    )


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("HEADGATE_CAPACITY", "many", "capacity: expected a whole number from 1 to 1,000,000, got 'many'"),
        ("HEADGATE_CAPACITY", "0", "capacity: expected a whole number from 1 to 1,000,000, got '0'"),
        ("HEADGATE_CAPACITY", "", "capacity: expected a whole number"),
        ("HEADGATE_HEARTBEAT_S", "0", "heartbeat_s: expected a number above 0 to 31,622,400, got '0'"),
        ("HEADGATE_HEARTBEAT_S", "-1", "heartbeat_s: expected a number above 0"),
        ("HEADGATE_HEARTBEAT_S", "nan", "heartbeat_s: expected a number above 0"),
        ("HEADGATE_HEARTBEAT_S", "inf", "heartbeat_s: expected a number above 0"),
        ("HEADGATE_COHORT_GRACE_S", "-1", "cohort_grace_s: expected a number from 0"),
        ("HEADGATE_LOG_FORMAT", "xml", "log_format: expected one of auto, human, json, got 'xml'"),
        ("HEADGATE_QUEUES", " , ", "queues: expected a list of names (at least one), got []"),
        ("HEADGATE_HOME", "", "home: expected a path, got ''"),
        ("HEADGATE_WEB_HOSTS", "ops.example.org:443", "web_hosts: 'ops.example.org:443' is no name of a host"),
        ("HEADGATE_WEB_HOSTS", "ops, https://ops", "web_hosts: 'https://ops' is no name of a host"),
        ("HEADGATE_WEB_TRUSTED_PROXIES", "10.0.0.1, proxy", "web_trusted_proxies: 'proxy' is neither an address nor a"),
        ("HEADGATE_WEB_TRUSTED_PROXIES", "10.0.0.1/8", "web_trusted_proxies: '10.0.0.1/8' is neither an address nor a"),
        ("HEADGATE_WEB_USER_HEADER", "X User", "web_user_header: 'X User' is no name of a header"),
        ("HEADGATE_WEB_USER_HEADER", "X-User", "web_user_header needs web_trusted_proxies"),
        ("HEADGATE_WEB_PLAIN_HTTP", "perhaps", "web_plain_http: expected true or false, got 'perhaps'"),
    ],
)
def test_a_bad_value_says_what_was_expected(folder: Path, name: str, value: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(folder, {name: value})

    assert str(caught.value).startswith(problem)
    assert caught.value.source == name


@pytest.mark.parametrize(
    "line", ["capacity = true", "capacity = 1.5", "queues = [1]", "heartbeat_s = inf", "[capacity]"]
)
def test_a_bad_value_in_the_file_names_the_file(folder: Path, line: str) -> None:
    file = write(folder / "headgate.toml", line)

    with pytest.raises(ConfigError, match="expected") as caught:
        load(folder)

    assert caught.value.source == str(file)


def test_a_table_in_the_file_is_an_error_that_says_where_settings_belong(folder: Path) -> None:
    write(folder / "headgate.toml", "[headgate]\ncapacity = 1")

    with pytest.raises(ConfigError, match=r"there is no table \[headgate\]: settings stand at the top level"):
        load(folder)


def test_a_folder_in_the_place_of_the_file_is_an_error(folder: Path) -> None:
    (folder / "headgate.toml").mkdir()

    with pytest.raises(ConfigError, match="this is a folder") as caught:
        load(folder)

    assert caught.value.source == str(folder / "headgate.toml")


def test_a_file_that_is_no_toml_is_an_error_that_says_where(folder: Path) -> None:
    write(folder / "headgate.toml", "capacity = 1\ncapacity 2")

    with pytest.raises(ConfigError, match=r"cannot be read: .*line 2"):
        load(folder)


@pytest.mark.parametrize(
    ("environ", "problem"),
    [
        ({"HEADGATE_HEARTBEAT_S": "16"}, "heartbeat_s must be at most half of lease_silence_max_s"),
        ({"HEADGATE_LEASE_SILENCE_MAX_S": "9"}, "heartbeat_s must be at most half of lease_silence_max_s"),
        ({"HEADGATE_RUNNER_SILENCE_MAX_S": "2"}, "runner_heartbeat_s must be less than runner_silence_max_s"),
        (
            {"HEADGATE_CUT_OFF_EXIT_S": "30"},
            "lease_silence_max_s must be less than cut_off_exit_s, but they are 30 and 30",
        ),
        ({"HEADGATE_RETRY_WAIT_S": "400"}, "retry_wait_s must be at most retry_wait_max_s"),
        ({"HEADGATE_FRAME_BYTES_MAX": "1000000", "HEADGATE_EVENT_BYTES_MAX": "1024"}, "must be at least 1,114,112"),
        ({"HEADGATE_FRAME_BYTES_MAX": "1048576"}, "event_bytes_max must be at least 65,536 less than frame_bytes_max"),
    ],
)
def test_settings_that_contradict_each_other_are_an_error_that_names_the_one_given(
    folder: Path, environ: dict[str, str], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        load(folder, environ)

    assert caught.value.source == next(iter(environ))


def test_an_optional_setting_can_be_unset_by_an_empty_variable(folder: Path) -> None:
    write(folder / "headgate.toml", 'capture = "frames"')

    assert load(folder, {"HEADGATE_CAPTURE": ""}).capture is None


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:pa@ss:w@host/db",
        "postgresql+psycopg://u:hunter2@h:5432/db",
        "postgresql://h/db?password=hunter2&x=1",
    ],
)
def test_no_password_and_no_key_is_ever_shown(folder: Path, url: str) -> None:
    settings = load(folder, {"HEADGATE_DATABASE_URL": url, "HEADGATE_FERNET_KEYS": "hunter2"})

    assert settings.database_url == url
    shown = repr(settings) + str(masked("database_url", url)) + str(masked("fernet_keys", "hunter2"))
    assert "hunter2" not in shown
    assert "ss:w" not in shown
    assert "***" in shown


@pytest.mark.parametrize("url", ["sqlite://", "sqlite:///", " sqlite:///:memory: "])
def test_a_database_in_memory_is_refused(folder: Path, url: str) -> None:
    with pytest.raises(ConfigError, match="database_url: a database in memory ends with its process"):
        load(folder, {"HEADGATE_DATABASE_URL": url})


@pytest.mark.parametrize(
    ("url", "got"),
    [
        ("u:hunter2@host/db", "got a text that does not begin with a scheme"),
        ("mysql://u:hunter2@host/db", "got one that begins with 'mysql://'"),
        ("hunter2@x://host", "got a text that does not begin with a scheme"),
    ],
)
def test_the_error_about_a_bad_database_url_names_the_scheme_and_nothing_else(folder: Path, url: str, got: str) -> None:
    with pytest.raises(ConfigError, match="database_url: expected a URL such as .*, " + re.escape(got)) as caught:
        load(folder, {"HEADGATE_DATABASE_URL": url})

    assert "hunter2" not in str(caught.value)


def test_the_url_of_a_host_that_writes_postgres_is_taken(folder: Path) -> None:
    url = load(folder, {"HEADGATE_DATABASE_URL": "postgres://u:p@h/db"}).database_url
    assert url == "postgresql://u:p@h/db"


def test_the_default_folder_of_dag_files_is_made_and_another_one_must_exist(folder: Path) -> None:
    settings = load(folder)
    settings.make_folders()
    assert settings.dags_folder == folder / "home" / "dags"
    assert settings.dags_folder.is_dir()

    with pytest.raises(ConfigError, match=re.escape(f"the folder of DAG files {folder}/nope does not exist")):
        load(folder, dags_folder="nope").make_folders()
    write(folder / "file", "")
    with pytest.raises(ConfigError, match="is not a folder"):
        load(folder, dags_folder="file").make_folders()


@pytest.mark.parametrize("home", ["file", "file/home"])
def test_a_home_that_is_a_file_or_within_one_is_refused_by_name(folder: Path, home: str) -> None:
    write(folder / "file", "")
    with pytest.raises(ConfigError, match=re.escape(f"the home {folder}/{home} is not a folder")):
        load(folder, home=home).make_folders()


def test_folders_of_modules_that_do_not_exist_are_found(folder: Path) -> None:
    (folder / "there").mkdir()
    assert load(folder, import_paths="there,nope").missing_import_paths() == [folder / "nope"]


def test_every_value_is_known_with_where_it_came_from(folder: Path) -> None:
    file = write(folder / "headgate.toml", "capacity = 10\nheartbeat_s = 2")

    resolved = resolve_settings(
        flags={"queues": "q"}, environ={"HEADGATE_HOME": "h", "HEADGATE_HEARTBEAT_S": "3"}, cwd=folder
    )

    assert resolved.file == file
    assert set(resolved.sources) == set(setting_sources.KEYS)
    assert resolved.sources["capacity"] == str(file)
    assert resolved.sources["heartbeat_s"] == "HEADGATE_HEARTBEAT_S"
    assert resolved.sources["queues"] == "--queues"
    assert resolved.sources["drain_s"] == "default"
    assert resolved.settings.home == folder / "h"


@pytest.mark.parametrize("key", setting_sources.KEYS)
def test_every_setting_has_a_reason_and_says_what_it_expects(key: str) -> None:
    assert setting_sources.reason(key).endswith(".")
    assert setting_sources.expected(key)


def test_the_runner_gets_every_setting_of_its_own(folder: Path) -> None:
    defaults = load(folder).runner_settings()
    assert msgspec.structs.replace(defaults, import_paths=()) == RunnerSettings()

    numbers = {
        field.name: 7.5 if field.type is float else 70_000 + index
        for index, field in enumerate(msgspec.structs.fields(RunnerSettings))
        if field.name != "import_paths"
    }
    numbers["frame_bytes_max"] = 2_000_000
    renamed = {"runner_heartbeat_s" if name == "heartbeat_s" else name: value for name, value in numbers.items()}
    flags: dict[str, Any] = {"import_paths": "/a"} | renamed
    settings = load(folder, **flags)

    assert settings.runner_settings() == RunnerSettings(**numbers, import_paths=("/a",))  # type: ignore[arg-type]


def test_the_logs_of_tasks_are_in_home_unless_another_folder_is_named(tmp_path: Path) -> None:
    in_home = load(tmp_path, {"HEADGATE_HOME": "h"})
    assert in_home.log_folder == tmp_path / "h" / "logs"
    named = load(tmp_path, {"HEADGATE_HOME": "h", "HEADGATE_LOG_FOLDER": "shared"})
    assert named.log_folder == tmp_path / "shared"
