// Where the page begins: which source answers, and the shell around it.
import { HttpSource } from "viewer/source/http";
import { EmbeddedSource } from "viewer/source/embedded";
import { Shell } from "viewer/shell";

const embedded = document.getElementById("run-data");
const source = embedded ? new EmbeddedSource(JSON.parse(embedded.textContent)) : new HttpSource();
const shell = new Shell(document.getElementById("app"), source);
window.viewer = shell; // for tests and for the curious
shell.start();
