def write_report(folder):
    raise NotImplementedError
