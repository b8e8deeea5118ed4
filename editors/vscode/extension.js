"use strict";
// Starts `attnspec lsp` when a spec is opened, and stops it with the editor.

const { window, workspace } = require("vscode");
const { LanguageClient } = require("vscode-languageclient/node");

let client;

function start() {
  const [command, ...args] = workspace.getConfiguration("attnspec").get("command");
  client = new LanguageClient(
    "attnspec",
    "attnspec",
    { command, args },
    { documentSelector: [{ language: "attn" }] }
  );
  return client.start().catch(error => {
    window.showErrorMessage(
      `attnspec: \`${[command, ...args].join(" ")}\` did not start (${error.message}). ` +
        'Install it with pip install "attnspec[lsp]", or say how to start it in attnspec.command.'
    );
  });
}

async function activate(context) {
  context.subscriptions.push(
    workspace.onDidChangeConfiguration(async event => {
      if (!event.affectsConfiguration("attnspec.command")) return;
      await deactivate();
      await start();
    })
  );
  await start();
}

async function deactivate() {
  if (client && client.isRunning()) await client.stop();
}

module.exports = { activate, deactivate };
