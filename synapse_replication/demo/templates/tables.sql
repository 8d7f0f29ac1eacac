{% for stream in streams.values() if not stream.in_memory %}
CREATE SEQUENCE {{ stream.sequence }} START 2;
CREATE TABLE {{ stream.table }} (
    stream_id bigint NOT NULL
    , instance_name text NOT NULL
{% for column, type in stream.columns.items() %}
    , {{ column }} {{ type.rstrip("?") }}
    {{- "" if type.endswith(("?", "json")) else " NOT NULL" }}
{% endfor %}
);
CREATE INDEX ON {{ stream.table }} (instance_name, stream_id);
{% endfor %}
