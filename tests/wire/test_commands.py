"""Tests of the commands and their lines."""

from __future__ import annotations

from hypothesis import given, settings, strategies as st
from twisted.trial.unittest import SynchronousTestCase

from synapse_replication.errors import (
    LocalProtocolError,
    UnknownCommandError,
    UnparsableLineError,
)
from synapse_replication.wire.commands import (
    COMMANDS,
    VALID_CLIENT_COMMANDS,
    VALID_SERVER_COMMANDS,
    CancelTaskCommand,
    ClearUserSyncsCommand,
    Command,
    ErrorCommand,
    FederationAckCommand,
    InvalidateCacheCommand,
    LockReleasedCommand,
    NameCommand,
    NewActiveTaskCommand,
    PingCommand,
    PositionCommand,
    RdataCommand,
    RemoteServerUpCommand,
    RemovePusherCommand,
    ReplicateCommand,
    ServerCommand,
    UserIpCommand,
    UserSyncCommand,
    parse_command_from_line,
)
from tests.wire.lines import LINES

#: Lines of older peers, with what they meant.
OLDER_LINES: dict[str, Command] = {
    "POSITION events 7": PositionCommand("events", "master", 7, 7),
    "POSITION events w 7": PositionCommand("events", "w", 7, 7),
    'RDATA events 7 ["ev", 1]': RdataCommand("events", "master", 7, ["ev", 1]),
    "RDATA events batch [1]": RdataCommand("events", "master", None, [1]),
    # A writer with such a name.
    "RDATA events 7 8 [1]": RdataCommand("events", "7", 8, [1]),
    "RDATA events batch 8 [1]": RdataCommand("events", "batch", 8, [1]),
}

#: Malformed lines of known commands.
MALFORMED = [
    "POSITION events",
    "POSITION events w 1 x",
    "POSITION  w 1 2",
    "POSITION events  1 2",
    "RDATA  w 1 []",
    "SERVER ",
    "SERVER a b",
    "REMOTE_SERVER_UP ",
    "NEW_ACTIVE_TASK ",
    "CANCEL_TASK a b",
    "CLEAR_USER_SYNC ",
    "CLEAR_USER_SYNC a b",
    "USER_SYNC  @u:x D start 5",
    "USER_SYNC i  D start 5",
    "FEDERATION_ACK  5",
    "POSITION events w 1 2 3",
    "POSITION events w 1 +2",
    "POSITION events w 1 1_0",
    "POSITION events w 1 \u0661",
    "POSITION events w 1 9223372036854775808",
    "RDATA events w 1",
    "RDATA events w one []",
    "RDATA events w  []",
    "RDATA events w 1 [NaN]",
    "RDATA events w 1 [Infinity]",
    "RDATA events w 1 [1] 2",
    "RDATA events w 1 ['a']",
    "RDATA events w 1 " + "[" * 100_000,
    "USER_SYNC i @u:x start",
    "USER_SYNC i start 5",
    "USER_SYNC i @u:x D maybe 5",
    "USER_SYNC i @u:x D start soon",
    "FEDERATION_ACK w x",
    "FEDERATION_ACK ",
    "USER_IP @u:x",
    "USER_IP @u:x []",
    'USER_IP @u:x ["syt_secret","10.1.0.1","",null,"x"]',
    "LOCK_RELEASED a b c",
    'LOCK_RELEASED ["a","b"]',
    "REMOVE_PUSHER a b",
    "INVALIDATE_CACHE f",
    "INVALIDATE_CACHE f 5",
]

WORDS = st.text(
    st.characters(blacklist_categories=["Cs"], blacklist_characters=" \n"), min_size=1
)
TEXTS = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\n"))
ANY_TEXTS = st.text(st.characters(blacklist_categories=["Cs"]))
TOKENS = st.integers(-(2**63), 2**63 - 1)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | ANY_TEXTS,
    lambda inner: st.lists(inner) | st.dictionaries(ANY_TEXTS, inner),
    max_leaves=8,
)
NAMES = WORDS.filter(lambda word: word.isprintable() and len(word.encode()) <= 255)
COMMAND_STRATEGY = st.one_of(
    st.builds(ServerCommand, NAMES),
    st.builds(NameCommand, TEXTS),
    st.builds(ReplicateCommand),
    st.builds(PositionCommand, NAMES, NAMES, TOKENS, TOKENS),
    st.builds(RdataCommand, NAMES, NAMES, st.none() | TOKENS, JSON),
    st.builds(PingCommand, TEXTS),
    st.builds(ErrorCommand, TEXTS),
    st.builds(
        UserSyncCommand,
        WORDS,
        WORDS,
        st.none() | TEXTS.filter(lambda text: text != "None"),
        st.booleans(),
        TOKENS,
    ),
    st.builds(ClearUserSyncsCommand, WORDS),
    st.builds(FederationAckCommand, st.none() | NAMES, TOKENS),
    st.builds(
        UserIpCommand,
        WORDS,
        ANY_TEXTS,
        ANY_TEXTS,
        ANY_TEXTS,
        st.none() | ANY_TEXTS,
        TOKENS,
    ),
    st.builds(RemoteServerUpCommand, NAMES),
    st.builds(LockReleasedCommand, NAMES, ANY_TEXTS, ANY_TEXTS),
    st.builds(NewActiveTaskCommand, NAMES),
    st.builds(CancelTaskCommand, NAMES),
    st.builds(RemovePusherCommand, WORDS, TEXTS, WORDS),
    st.builds(InvalidateCacheCommand, WORDS, st.none() | st.lists(JSON)),
)


class LineTests(SynchronousTestCase):
    """Decoding and encoding of lines."""

    def test_each_form_is_read(self) -> None:
        """Every form of a line is decoded to its command."""
        for line, command in (LINES | OLDER_LINES).items():
            self.assertEqual(parse_command_from_line(line), command)

    def test_each_form_is_written(self) -> None:
        """Every command is encoded as the line that peers expect."""
        for line, command in LINES.items():
            self.assertEqual(command.encode(), line.encode())

    def test_every_command_has_a_line_here(self) -> None:
        """Every command has at least one line in these tests."""
        self.assertEqual({command.NAME for command in LINES.values()}, COMMANDS.keys())

    @settings(derandomize=True, deadline=None)
    @given(COMMAND_STRATEGY)
    def test_round_trip(self, command: Command) -> None:
        """An encoded command is decoded to the same command."""
        line = command.encode().decode()
        self.assertEqual(parse_command_from_line(line), command)
        self.assertNotIn("\n", line)

    @settings(derandomize=True, deadline=None)
    @given(st.sampled_from(sorted(COMMANDS)), TEXTS)
    def test_any_text_is_read_or_refused(self, name: str, text: str) -> None:
        """Any text is either decoded or raises an error of the protocol."""
        try:
            command = parse_command_from_line(f"{name} {text}")
        except UnparsableLineError as error:
            self.assertEqual(error.command_name, name)
        else:
            again = parse_command_from_line(command.encode().decode())
            self.assertEqual(again, command)

    def test_names(self) -> None:
        """A name that is too long or not printable is refused and not repeated."""
        good = "n" * 255
        for bad in ("n" * 256, "\xe9" * 128, "a\x1bb", "a\0b", "a\u202eb", "a\x7f"):
            for line in (
                "RDATA {} w batch []",
                "RDATA events {} batch []",
                "POSITION {} w 1 2",
                "POSITION events {} 1 2",
                "REMOTE_SERVER_UP {}",
                "NEW_ACTIVE_TASK {}",
                "FEDERATION_ACK {} 5",
                'LOCK_RELEASED ["{}","a","b"]',
            ):
                parse_command_from_line(line.format(good))
                with self.assertRaises(UnparsableLineError) as raised:
                    parse_command_from_line(line.format(bad))
                self.assertLess(len(str(raised.exception)), 120)
                self.assertTrue(str(raised.exception).isprintable())

    def test_ids(self) -> None:
        """
        Ids chosen by users may contain any characters, but their length is limited.
        """
        device = "\x1b" * 4096
        parse_command_from_line(f"USER_SYNC i @u:hs {device} start 5")
        with self.assertRaises(UnparsableLineError):
            parse_command_from_line(f"USER_SYNC i @u:hs {device}x start 5")

    def test_malformed(self) -> None:
        """A malformed line is refused by an error that names its command."""
        for line in MALFORMED:
            error = self.assertRaises(
                UnparsableLineError, parse_command_from_line, line
            )
            self.assertEqual(error.command_name, line.split()[0], line[:50])

    def test_unknown(self) -> None:
        """An unknown command raises a different error from a malformed one."""
        for line in ("FROB x", "", " ", "ping 1", "Command x"):
            error = self.assertRaises(
                UnknownCommandError, parse_command_from_line, line
            )
            self.assertEqual(error.command_name, line.split(" ")[0])

    def test_errors_keep_secrets(self) -> None:
        """An error about USER_IP does not contain the access token."""
        for text in ('["syt_secret",1]', '["syt_secret"', '["syt_secret","i","u",0,0]'):
            error = self.assertRaises(
                UnparsableLineError, parse_command_from_line, f"USER_IP @u:x {text}"
            )
            self.assertNotIn("syt_secret", str(error))

    def test_replicate_of_older_peers(self) -> None:
        """REPLICATE is accepted with arguments and without a trailing space."""
        for line in ("REPLICATE", "REPLICATE events 12"):
            self.assertEqual(parse_command_from_line(line), ReplicateCommand())


class UserSyncTests(SynchronousTestCase):
    """USER_SYNC, whose fields are ambiguous."""

    def test_device_id_with_spaces(self) -> None:
        """A device id may contain spaces anywhere."""
        for device_id in ("my phone", " my  phone ", "start", "a start 5", "", " "):
            command = UserSyncCommand("i", "@u:x", device_id, True, 5)
            self.assertEqual(
                UserSyncCommand.from_line(command.to_line()), command, device_id
            )

    def test_older_form(self) -> None:
        """The older form has no device id."""
        self.assertEqual(
            parse_command_from_line("USER_SYNC i @u:x end 5"),
            UserSyncCommand("i", "@u:x", None, False, 5),
        )

    def test_empty_id(self) -> None:
        """The error for an empty id does not complain about the number of fields."""
        with self.assertRaises(UnparsableLineError) as caught:
            parse_command_from_line("USER_SYNC  @u:x D start 5")
        self.assertIn("the instance id or the user id is empty", str(caught.exception))

    def test_device_called_none(self) -> None:
        """A device id ``None`` is read as no device: their lines are identical."""
        line = UserSyncCommand("i", "@u:x", "None", True, 5).to_line()
        self.assertIsNone(UserSyncCommand.from_line(line).device_id)


class EncodeTests(SynchronousTestCase):
    """Commands that cannot be encoded as a line are refused."""

    def test_line_end(self) -> None:
        """A line end within a field is refused: it would begin another line."""
        for command in (
            PingCommand("1\nERROR x"),
            UserSyncCommand("i", "@u:x", "my\nphone", True, 5),
        ):
            self.assertRaises(LocalProtocolError, command.encode)

    def test_line_end_inside_json(self) -> None:
        """Line ends within JSON are escaped."""
        command = RdataCommand("s", "w", 1, ["a\nb\r\u2028"])
        line = command.encode().decode()
        self.assertEqual(parse_command_from_line(line), command)

    def test_not_json(self) -> None:
        """Values that JSON cannot encode, such as NaN, are refused."""
        for value in (float("nan"), float("inf"), object(), "\ud800"):
            self.assertRaises(
                LocalProtocolError, RdataCommand("s", "w", 1, [value]).to_line
            )

    def test_rows(self) -> None:
        """The fast encoding of RDATA equals the general one, errors included."""
        for token in (7, None, -(2**63)):
            command = RdataCommand("s", "w", token, ["a", None, {"b": [1.5]}])
            line = f"RDATA {command.to_line()}".encode()
            self.assertEqual(command.encode(), line)
        for bad in (
            RdataCommand("s", "w", 1, [None, float("nan")]),
            RdataCommand("s\nERROR x", "w", 1, []),
            RdataCommand("s", "\ud800", 1, []),
        ):
            self.assertRaises(LocalProtocolError, bad.encode)

    def test_not_text(self) -> None:
        """A lone surrogate is refused."""
        self.assertRaises(LocalProtocolError, PingCommand("\ud800").encode)


class CommandTests(SynchronousTestCase):
    """Commands as values."""

    def test_repr_masks_access_token(self) -> None:
        """``repr`` and ``str`` of USER_IP do not contain the access token."""
        command = UserIpCommand("@u:x", "syt_secret", "10.1.0.1", "ua", None, 5)
        self.assertNotIn("syt_secret", repr(command))
        self.assertNotIn("syt_secret", str(command))
        self.assertNotIn("syt_secret", str(command.__rich_repr__()))
        self.assertIn("10.1.0.1", repr(command))

    def test_frozen(self) -> None:
        """A command cannot be modified."""
        with self.assertRaises(AttributeError):
            PingCommand("1").data = "2"  # type: ignore[misc]

    def test_text_commands_are_different(self) -> None:
        """Commands with equal text but different names are not equal."""
        self.assertNotEqual(PingCommand("x"), NameCommand("x"))

    def test_redis_channels(self) -> None:
        """USER_IP has its own channel; all others share one."""
        for command in COMMANDS.values():
            self.assertEqual(
                command.redis_channel_name("repl.test"),
                "repl.test/USER_IP" if command is UserIpCommand else "repl.test",
            )

    def test_directions(self) -> None:
        """Each command is valid in at least one direction."""
        self.assertEqual(VALID_CLIENT_COMMANDS | VALID_SERVER_COMMANDS, COMMANDS.keys())
        self.assertEqual(
            VALID_CLIENT_COMMANDS - VALID_SERVER_COMMANDS,
            {
                "NAME",
                "REPLICATE",
                "USER_SYNC",
                "CLEAR_USER_SYNC",
                "FEDERATION_ACK",
                "USER_IP",
                "REMOVE_PUSHER",
                "INVALIDATE_CACHE",
            },
        )
        self.assertEqual(VALID_SERVER_COMMANDS - VALID_CLIENT_COMMANDS, {"SERVER"})
