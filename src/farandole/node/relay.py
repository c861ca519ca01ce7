"""Connect standard input and output with a port of this machine: python3 -I -c TEXT PORT"""

import os
import selectors
import socket
import sys


def main(port: int) -> int:
    """Pass bytes on until one side ends."""
    try:
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    except OSError as error:
        print(f"nothing answers at port {port} of {socket.gethostname()}: {error.strerror}", file=sys.stderr)
        return 1
    connection.settimeout(None)
    with connection, selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        selector.register(connection, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd == 0:
                    if data := os.read(0, 1 << 16):
                        connection.sendall(data)
                    else:
                        selector.unregister(0)
                        connection.shutdown(socket.SHUT_WR)
                    continue
                data = connection.recv(1 << 16)
                if not data:
                    return 0
                while data:
                    data = data[os.write(1, data) :]


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
