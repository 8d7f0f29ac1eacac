"""Files of earlier releases, and tests that this tree continues their work.

``VERSION.tar.xz`` has the files of one deployment of a release: the configuration
(``*.yaml``; the folder is ``@FOLDER@``), the journals of the readers
(``*.journal.jsonl``), the database with the stored positions (``database.sql``), the
archive of its rows (``archive/``), and messages of the extension (``extension.jsonl``).
To add a release, record them from its wheel, and commit the file; the tests run with
each file in this folder::

    pip wheel --no-deps git+file://$PWD@93f13da0
    python -m tests.compatibility.record synapse_replication-0.1.0-py3-none-any.whl
"""
