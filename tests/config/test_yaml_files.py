"""Tests for synapse_replication.config.yaml_files."""

from __future__ import annotations

from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.config import yaml_files
from synapse_replication.config.models import RedisSection
from synapse_replication.config.yaml_files import (
    MergedFiles,
    did_you_mean,
    dotted,
    read_secret,
)
from tests.support.config_files import FilesMixin


class ReadFilesTests(FilesMixin):
    def test_later_file_wins_per_top_level_key(self) -> None:
        """A section of a later file replaces the whole section of an earlier file."""
        one = self.write("1.yaml", "redis: {host: a, port: 1}\nserver_name: s\n")
        two = self.write("2.yaml", "redis: {host: b}\n")
        merged = self.read(one, two)
        self.assertEqual(merged.values, {"redis": {"host": "b"}, "server_name": "s"})
        self.assertEqual(self.problems, [])

    def test_own_section_is_merged_key_by_key(self) -> None:
        """
        The project's own section is merged key by key, so that a worker's file may add
        to it.
        """
        one = self.write("1.yaml", "synapse_replication: {streams: [typing], a: 1}\n")
        two = self.write("2.yaml", "synapse_replication:\n  a: 2\n  row_sink: x\n")
        merged = self.read(one, two)
        self.assertEqual(
            merged.values["synapse_replication"],
            {"streams": ["typing"], "a": 2, "row_sink": "x"},
        )
        problem = merged.problem(("synapse_replication", "a"), "p", "m")
        self.assertEqual((problem.file, problem.line), (two, 2))
        problem = merged.problem(("synapse_replication", "streams", 0), "p", "m")
        self.assertEqual((problem.file, problem.line), (one, 1))

    def test_location_of_a_replaced_key(self) -> None:
        """A problem is reported at the source location of the value in use."""
        one = self.write("1.yaml", "redis:\n  host: a\n  port: x\n")
        two = self.write("2.yaml", "\n\nredis: {}\n")
        merged = self.read(one, two)
        problem = merged.problem(("redis", "port"), "p", "m")
        self.assertEqual((problem.file, problem.line), (two, 3))
        self.assertEqual(str(problem), f"{two}:3: redis.port: p; m")

    def test_missing_key_is_in_all_files(self) -> None:
        """A missing key is reported for all files."""
        one = self.write("1.yaml", "a: 1\n")
        two = self.write("2.yaml", "")
        problem = self.read(one, two).problem(("server_name",), "is missing", "add it")
        self.assertEqual((problem.file, problem.line), (f"{one}, {two}", None))

    def test_folder(self) -> None:
        """A folder stands for its YAML files, in the order of their names."""
        two = self.write("2.yaml", "a: 2\n")
        one = self.write("1.yaml", "a: 1\nb: 1\n")
        self.write("3.yaml~", "a: 3\n")
        merged = self.read(str(self.folder))
        self.assertEqual(merged.files, (one, two))
        self.assertEqual(merged.values, {"a": 2, "b": 1})

    def test_empty_folder(self) -> None:
        """A folder with other files only is an error; an empty one is not."""
        self.write(".keep", "")
        self.read(str(self.folder))
        self.assertEqual(self.problems, [])
        self.write("worker.yml", "a: 1\n")
        self.read(str(self.folder))
        self.assertIn(
            "it contains worker.yml, but no .yaml file", str(self.problems[0])
        )

    def test_syntax_error_names_the_line_and_no_content(self) -> None:
        """A syntax error is reported with its line but without the line's content."""
        file = self.write("1.yaml", "server_name: s\nredis: {password: hunter2\n")
        self.read(file)
        (problem,) = self.problems
        self.assertEqual((problem.file, problem.line), (file, 3))
        self.assertIn("YAML syntax", problem.problem)
        self.assertNotIn("hunter2", str(problem))

    def test_unquoted_secret(self) -> None:
        """A secret that looks like an alias, an anchor or a tag is not repeated."""
        for secret, what in (
            ("*hunter2", "found undefined alias"),
            ("!hunter2", "could not determine a constructor for the tag"),
            ("&hunter2 a\nb: &hunter2 b", "second occurrence"),
            ("!hunter2!x", "undefined tag handle"),
        ):
            self.problems.clear()
            self.read(self.write("1.yaml", f"password: {secret}\n"))
            text = "".join(map(str, self.problems))
            self.assertNotIn("hunter2", text)
            self.assertIn(what, text)

    def test_invalid_yaml(self) -> None:
        """Other errors of the YAML parser are reported too, without content."""
        for text, what, line in (
            ("a: 1\nb: secret\0", "a control character", 2),
            ("a: 2024-13-45", "an impossible date or number", None),
            ("a: &a [*a]", "nested too deeply", None),
            ("[" * 5000, "nested too deeply", None),
        ):
            self.problems.clear()
            self.read(self.write("1.yaml", text))
            (problem,) = self.problems
            self.assertIn(what, problem.problem)
            self.assertEqual(problem.line, line)
            self.assertNotIn("secret", str(problem))

    def test_too_many_bytes(self) -> None:
        """A file of any length costs only as many bytes as it may have."""
        self.read("/dev/zero")
        self.assertIn("/dev/zero", str(self.problems[0]))
        self.assertIn("it has more than 4,194,304 bytes", str(self.problems[0]))
        # The parser takes seconds for a file of the greatest length.
        self.patch(yaml_files, "MAX_YAML_BYTES", 4096)
        text = "a: 1\n#" + "x" * 4096
        for content, problems in ((text[:4096], 0), (text[:4097], 1)):
            self.read(self.write("1.yaml", content))
            self.assertEqual(len(self.problems), problems)

    def test_every_unreadable_file_is_reported(self) -> None:
        """All files that cannot be read are reported together."""
        missing = str(self.folder / "missing.yaml")
        binary = self.folder / "binary.yaml"
        binary.write_bytes(b"\xff\xfe\x00")
        sequence = self.write("list.yaml", "- 1\n")
        merged = self.read(missing, str(binary), sequence)
        self.assertEqual(
            [problem.file for problem in self.problems],
            [missing, str(binary), sequence],
        )
        self.assertIn("No such file", str(self.problems[0]))
        self.assertEqual(merged.values, {})


class ReadSecretTests(FilesMixin):
    def secret(self, inline: str | None, path: str | None) -> str | None:
        merged = MergedFiles(("f.yaml",), {}, {})
        section = RedisSection(password=inline, password_path=path)
        found = read_secret(section, ("redis", "password"), merged)
        self.problems += merged.problems
        return found

    def test_from_file(self) -> None:
        """A secret may come from a file; the trailing line break is removed."""
        self.assertEqual(self.secret(None, self.write("s", "hush\n")), "hush")
        self.assertEqual(self.problems, [])

    def test_inline(self) -> None:
        """A secret may be given in the configuration itself."""
        self.assertEqual(self.secret("hush", None), "hush")
        self.assertIsNone(self.secret(None, None))

    def test_both(self) -> None:
        """
        A secret that is given inline and by a file is an error that names both keys.
        """
        self.assertIsNone(self.secret("hush", self.write("s", "x")))
        text = str(self.problems[0])
        self.assertIn("remove redis.password or redis.password_path", text)
        self.assertNotIn("hush", text)

    def test_missing_and_empty(self) -> None:
        """A secret's file that is missing or empty is an error that names its key."""
        self.assertIsNone(self.secret(None, str(self.folder / "no")))
        self.assertIsNone(self.secret(None, self.write("empty", " \n")))
        self.assertEqual(
            [problem.key for problem in self.problems], ["redis.password_path"] * 2
        )

    def test_too_many_bytes(self) -> None:
        """A secret's file of any length costs only as many bytes as it may have."""
        self.assertIsNone(self.secret(None, "/dev/zero"))
        self.assertIn("it has more than 65,536 bytes", str(self.problems[0]))


class TextTests(SynchronousTestCase):
    def test_dotted(self) -> None:
        """A key path is written with dots, and with indexes in brackets."""
        self.assertEqual(
            dotted(("listeners", 0, "resources", 1)), "listeners[0].resources[1]"
        )

    def test_did_you_mean(self) -> None:
        """A similar word is suggested; if there is none, nothing is suggested."""
        self.assertEqual(did_you_mean("row_snik", ["row_sink", "modules"]), "row_sink")
        self.assertIsNone(did_you_mean("zzz", ["row_sink", "modules"]))


class RepeatedKeyTests(FilesMixin):
    """Tests for keys that a file has twice, of which YAML takes the last."""

    def test_repeated(self) -> None:
        """A repeated key is a problem at any depth, and its values are not shown."""
        file = self.write(
            "1.yaml",
            "server_name: s\nredis:\n  password: hush1\n  port: 1\n"
            "  password: hush2\nlisteners: [{type: a, type: b}]\nserver_name: t\n",
        )
        found = [str(each) for each in self.read(file).problems]
        self.assertEqual(
            [each.removeprefix(f"{file}:").partition(", first")[0] for each in found],
            [
                "5: redis.password: the key is there twice",
                "6: listeners[0].type: the key is there twice",
                "7: server_name: the key is there twice",
            ],
        )
        self.assertNotIn("hush", "".join(found))

    def test_merged(self) -> None:
        """A key that replaces one of a merged mapping is not repeated."""
        file = self.write(
            "1.yaml",
            "a: &a {x: 1}\nb: &b {y: 1}\nc:\n  <<: *a\n  <<: *b\n  x: 2\n",
        )
        merged = self.read(file)
        self.assertEqual(merged.problems, [])
        self.assertEqual(merged.values["c"]["x"], 2)
