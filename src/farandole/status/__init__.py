"""`farandole status`: how a cluster is at this moment, on one screen."""
