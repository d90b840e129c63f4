"""What UCX says that it does with a put, read from the log of the first round: the transport that really carries it."""
import re

ENVIRONMENT = {"UCX_PROTO_INFO": "y"}
CONNECTION = re.compile(r"\|\s*initiator (intra-node|inter-node) cfg#\d+")
PUT = re.compile(r"\|\s*remote memory write by ucp_put\*(\(multi\))? from host memory to host")
ROW = re.compile(r"\|\s*(\S+\.\.\S+)\s*\|\s*(.+?)\s*\|\s*(.+?)\s*\|")


def puts(text):
    """The protocols of the initiator's puts by message size, as in "0..inf zero-copy cma/memory"."""
    found = []
    state = "outside"
    for line in text.splitlines():
        if CONNECTION.search(line):
            state = "connection"
        elif state == "connection" and PUT.search(line):
            state = "put"
            found = []
        elif state == "put" and ROW.search(line):
            found.append(" ".join(ROW.search(line).groups()))
        elif state == "put" and found and "+--" in line:
            state = "outside"
        elif state == "connection" and "+--" not in line:
            state = "outside"
    return "; ".join(found)


def read(path):
    """Over all logs that UCX wrote beside `path`, each with the process id at its end."""
    texts = [log.read_text(errors="replace") for log in sorted(path.parent.glob(path.name + ".*"))]
    return next((puts(text) for text in texts if puts(text)), "")
