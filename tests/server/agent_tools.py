"""Functions as agents and MCP servers send them: their kinds of schemas, in our own words.

Schemas come from zod (``$schema``, ``additionalProperties``, ``propertyNames`` of records, bounds of JavaScript's
integers, dates by patterns with look-ahead), from pydantic (``anyOf`` with null, ``title``, ``$defs``, bounds that
exclude), from OpenAPI (formats such as int64 and binary) and from hands (a ``type`` that is none, a ``required`` of
what is not there).
"""

from __future__ import annotations

from typing import Any, NamedTuple

STRING, BOOL = {"type": "string"}, {"type": "boolean"}
INTEGER = {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991}
URL = {"type": "string", "format": "uri"}
LEAP_YEARS = r"^(?:(?:\d\d[2468][048]|\d\d[13579][26])-02-29|(?!\d{4}-02-29)\d{4}-\d{2}-\d{2})$"


class AgentTool(NamedTuple):
    """A function, and what of its schema is not enforced, as JSON pointers."""

    name: str
    parameters: dict[str, Any]
    left_out: tuple[str, ...] = ()


def zod(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


def pydantic(required: str = "", **properties: Any) -> dict[str, Any]:
    titled = {name: {"title": name.title(), **value} for name, value in properties.items()}
    return {"title": "Arguments", "type": "object", "properties": titled, "required": required.split()}


def nullable(schema: dict[str, Any], default: Any = None) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}], "default": default}


def strings(**more: Any) -> dict[str, Any]:
    return {"type": "array", "items": STRING, **more}


AGENT_TOOLS = [
    # files
    AgentTool("read_text_file", zod("path", path=STRING, head={"type": "number"}, tail={"type": "number"})),
    AgentTool("read_multiple_files", zod("paths", paths=strings(minItems=1))),
    AgentTool(
        "edit_file",
        zod(
            "path edits",
            path={"type": "string", "format": "path"},
            edits={"type": "array", "items": zod("oldText newText", oldText=STRING, newText=STRING)},
            dryRun={**BOOL, "default": False},
        ),
    ),
    AgentTool(
        "search_files",
        zod("path pattern", path=STRING, pattern=STRING, excludePatterns=strings(default=[], uniqueItems=True)),
        ("#/properties/excludePatterns/uniqueItems",),
    ),
    # a coding agent's own
    AgentTool(
        "shell",
        zod(
            "command",
            command={"type": "string", "minLength": 1, "maxLength": 1_000_000},
            timeout={"type": "number", "exclusiveMinimum": 0, "maximum": 600000},
            env={"type": "object", "propertyNames": STRING, "additionalProperties": STRING},
        ),
    ),
    AgentTool(
        "write_todos",
        zod(
            "todos",
            todos={
                "type": "array",
                "items": zod(
                    "content status",
                    content={"type": "string", "minLength": 1},
                    status={"type": "string", "enum": ["pending", "in_progress", "completed"]},
                ),
                "contains": {"properties": {"status": {"const": "in_progress"}}},
                "maxContains": 1,
            },
        ),
        ("#/properties/todos/contains",),
    ),
    AgentTool(
        "ask_user",
        zod(
            "questions",
            questions={
                "type": "array",
                "minItems": 1,
                "maxItems": 4,
                "items": zod("question", question=STRING, options=strings(minItems=2, maxItems=4, uniqueItems=False)),
            },
            answers={
                "type": "object",
                "propertyNames": {"type": "string", "pattern": "^q[0-9]+$"},
                "additionalProperties": STRING,
            },
        ),
        ("#/properties/answers/propertyNames",),
    ),
    AgentTool("grep", zod("pattern", pattern={"type": "string", "format": "regex"}, **{"-i": BOOL, "-C": INTEGER})),
    # git
    AgentTool(
        "git_log",
        pydantic(
            "repo_path",
            repo_path={"type": "string", "format": "path"},
            max_count={"type": "integer", "default": 10},
            start_timestamp=nullable(STRING),
        ),
    ),
    AgentTool(
        "git_branch",
        pydantic(
            "repo_path branch_type",
            repo_path=STRING,
            branch_type={"type": "string", "enum": ["local", "remote", "all"]},
            contains=nullable({"type": "string", "pattern": "^(?!-)"}),
        ),
        ("#/properties/contains/anyOf/0/pattern",),
    ),
    # the web
    AgentTool(
        "fetch",
        pydantic(
            "url",
            url={"type": "string", "format": "uri", "minLength": 1},
            max_length={"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 1000000, "default": 5000},
            raw={**BOOL, "default": False},
        ),
    ),
    AgentTool(
        "web_search",
        zod(
            "query",
            query={"type": "string", "minLength": 2, "maxLength": 400},
            allowed_domains=strings(),
            blocked_domains=strings(),
        )
        | {"not": {"required": ["allowed_domains", "blocked_domains"]}},
        ("#/not",),
    ),
    AgentTool(
        "crawl",
        zod(
            "url",
            url=URL,
            limit={**INTEGER, "exclusiveMinimum": 0, "maximum": 10000},
            formats={"type": "array", "items": {"anyOf": [{"const": "markdown"}, zod("type", type={"const": "json"})]}},
            scrapeOptions={
                "type": "object",
                "properties": {"waitFor": {"type": "number"}},
                "unevaluatedProperties": False,
            },
        ),
        ("#/properties/scrapeOptions/unevaluatedProperties",),
    ),
    # a browser
    AgentTool("browser_navigate", zod("url", url={"type": "string", "format": "url"})),
    AgentTool(
        "browser_click",
        zod(
            "element ref",
            element=STRING,
            ref=STRING,
            button={"type": "string", "enum": ["left", "right", "middle"]},
            modifiers={"type": "array", "items": {"enum": ["Alt", "Control", "Meta", "Shift"]}, "uniqueItems": True},
        ),
        ("#/properties/modifiers/uniqueItems",),
    ),
    AgentTool(
        "browser_fill_form",
        zod(
            "fields",
            fields={
                "type": "array",
                "items": zod(
                    "name type value",
                    name=STRING,
                    type={"type": "string", "enum": ["textbox", "checkbox", "slider"]},
                    value={"type": ["string", "boolean", "number"]},
                ),
            },
        ),
    ),
    AgentTool(
        "browser_wait_for",
        zod(time={"type": "number"}, text=STRING, textGone=STRING)
        | {
            "if": {"not": {"required": ["time"]}},
            "then": {"anyOf": [{"required": ["text"]}, {"required": ["textGone"]}]},
        },
        ("#/then",),
    ),
    # a forge
    AgentTool(
        "push_files",
        {
            "type": "object",
            "properties": {
                "owner": STRING,
                "repo": {"type": "string", "pattern": "^(?!\\.)[\\w.-]+$"},
                "files": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"path": STRING, "content": {"type": "string", "format": "byte"}},
                        "required": ["path", "content"],
                        "additionalProperties": False,
                    },
                },
            },
            "required": ["owner", "repo", "files"],
        },
        ("#/properties/repo/pattern",),
    ),
    AgentTool(
        "list_issues",
        {
            "type": "object",
            "properties": {
                "state": {"type": "string", "enum": ["OPEN", "CLOSED"]},
                "perPage": {"type": "number", "minimum": 1, "maximum": 100},
                "since": {"type": "string", "format": "date-time"},
                "labels": strings(),
            },
            "required": ["owner", "repo"],
        },
    ),
    AgentTool(
        "create_issue",
        {
            "type": "object",
            "properties": {"title": {"type": "str"}, "assignees": strings(), "milestone": {"type": "int"}},
            "required": ["title"],
        },
        ("#/properties/title/type", "#/properties/milestone/type"),
    ),
    # databases
    AgentTool("execute_sql", pydantic("query", query=STRING, params=nullable({"type": "array", "items": {}}))),
    AgentTool(
        "insert_rows",
        zod(
            "table rows",
            table={"type": "string", "pattern": "^[A-Za-z_][A-Za-z0-9_]{0,62}$"},
            rows={"type": "array", "items": {"type": "object", "additionalProperties": {}, "minProperties": 1}},
        ),
    ),
    AgentTool(
        "find_documents",
        {
            "type": "object",
            "properties": {
                "filter": {"type": "object", "properties": {"_id": STRING}, "maxProperties": 8},
                "limit": {"type": "integer", "format": "int64"},
            },
            "dependentRequired": {"limit": ["filter"]},
        },
        ("#/dependentRequired", "#/properties/filter/maxProperties"),
    ),
    # memory, notes, calendars
    AgentTool(
        "create_entities",
        zod("entities", entities={"type": "array", "items": zod("name", name=STRING, observations=strings())}),
    ),
    AgentTool(
        "search_notes",
        zod(
            "query",
            query=STRING,
            created_after={"type": "string", "pattern": LEAP_YEARS, "format": "date"},
            page_size={"default": 10, **INTEGER, "minimum": 1},
        ),
        ("#/properties/created_after/pattern",),
    ),
    AgentTool(
        "upload_attachment",
        {
            "type": "object",
            "properties": {
                "file": {"type": "string", "format": "binary", "contentEncoding": "base64"},
                "secret": {"type": "string", "format": "password"},
                "size": {"type": "integer", "format": "int32", "nullable": True},
            },
        },
    ),
    AgentTool(
        "query_block",
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {"filter": {"$ref": "#/$defs/filter"}},
            "$defs": {
                "filter": {
                    "anyOf": [
                        {
                            "type": "object",
                            "properties": {"and": {"type": "array", "items": {"$ref": "#/$defs/filter"}}},
                            "required": ["and"],
                            "additionalProperties": False,
                        },
                        {
                            "type": "object",
                            "properties": {"property": {"type": "string", "not": {"const": ""}}, "equals": BOOL},
                            "required": ["property", "equals"],
                            "additionalProperties": False,
                        },
                    ]
                }
            },
        },
        ("#/$defs/filter/anyOf/1/properties/property/not",),
    ),
    AgentTool(
        "think",
        {"type": "object", "properties": {"thought": STRING, "revises": {"type": "any"}}},
        ("#/properties/revises/type",),
    ),
    AgentTool("list_allowed_directories", {"type": "object", "properties": {}}),
    AgentTool("now", {}),
]
