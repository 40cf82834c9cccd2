"""`shardplan fmt`: formatting plans in one form."""

from __future__ import annotations

import argparse
from difflib import unified_diff

from shardplan.core.report import Report
from shardplan.core.sources import SourceMap
from shardplan.core.user_files import CannotRead, decode, in_form_of, read_bytes, with_unix_ends
from shardplan.language.format_plan import format_plan
from shardplan.language.limits import MAX_BYTES
from shardplan.language.old_words import with_shares
from shardplan.language.parsing import parse_plan
from shardplan.language.plan_files import is_file
from shardplan.language.reader import read_document

from .exits import CLEAN, FINDINGS, UsageError
from .lint_command import plans_of
from .output import finish, put, say, show, write_file


def run(args: argparse.Namespace) -> int:
    if named := [word for word in args.plans if word.lower().endswith(".json")]:
        raise UsageError(f"{named[0]} is JSON: only plans in YAML are formatted")
    files = [file for word in args.plans for file in plans_of(word) if not file.lower().endswith(".json")]
    if builtin := [file for file in files if not is_file(file)]:
        raise UsageError(f"{builtin[0]} is no file: built-in plans are not formatted")
    changed = 0
    for file in dict.fromkeys(files):
        try:
            content = read_bytes(file, MAX_BYTES)
            text = with_unix_ends(decode(content))
        except CannotRead:
            return finish(_findings(file), args)
        if read_document(text, file).root is None:
            return finish(_findings(file), args)
        made = format_plan(with_shares(text, file), file)
        if made == text:
            continue
        changed += 1
        if args.diff:
            put("".join(unified_diff(text.splitlines(True), made.splitlines(True), file, file)), end="")
        elif args.check:
            show(f"{file}: would be formatted")
        else:
            write_file(file, in_form_of(content, made))
    what = "would be formatted" if args.check or args.diff else "formatted"
    say(f"{changed} of {len(dict.fromkeys(files))} files {what}")
    return FINDINGS if changed and (args.check or args.diff) else CLEAN


def _findings(file: str) -> Report:
    parsed = parse_plan(file)
    return Report(parsed.diagnostics, sources=SourceMap(parsed.sources.files), plans=(file,))
